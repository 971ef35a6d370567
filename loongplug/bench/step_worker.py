"""One rank of a measured training run: ``-m loongplug.bench.step_worker FIGURES WARMUP FLAGS``."""

import sys
from pathlib import Path

from loongplug.bench.step import StepFigures
from loongplug.train import started


def main() -> None:
    """Train, then write what the steps after the warm-up took. Every rank enters."""
    path, warmup, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with started(flags):
        import torch

        from loongplug.platform import current_platform
        from loongplug.training.progress import StepReport
        from loongplug.training.run import run

        def end_of_warmup(report: StepReport) -> None:
            if report.iteration == warmup:
                current_platform().reset_peak_memory()

        reports = run(flags, on_report=end_of_warmup)
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
