"""One rank of a measured training run: ``-m loongplug.bench.step_worker FIGURES WARMUP FLAGS``."""

import sys
from pathlib import Path

from loongplug.bench.step import StepFigures
from loongplug.parallel.failure import failure_board
from loongplug.platform import activate, current_platform
from loongplug.training.flags import requested_device


def main() -> None:
    """Train, then write what the steps after the warm-up took. Every rank enters."""
    path, warmup, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with failure_board():
        activate(requested_device(flags))
        import torch

        from loongplug.training.run import run

        reports = run(flags)
        peaks: list[int] = [0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, current_platform().peak_memory_bytes())
        if torch.distributed.get_rank() == 0:
            measured = reports[warmup:]
            figures = StepFigures(
                ranks=len(peaks),
                warmup=warmup,
                step_seconds=tuple(report.seconds for report in measured),
                step_tokens=tuple(report.tokens for report in measured),
                losses=tuple(report.loss for report in reports),
                peak_memory_bytes=tuple(peaks),
            )
            figures.write(path)


if __name__ == "__main__":
    main()
