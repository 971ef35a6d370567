"""One rank of a measured conversion: ``-m micro.convert_worker FIGURES FLAGS``."""

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from loongplug.train import started

_SAMPLING_SECONDS = 0.02


@dataclass(frozen=True)
class RankFigures:
    """What one rank's conversion took."""

    seconds: float  # from parsed flags to the finished target
    peak_memory_bytes: int  # of its own (anonymous), beyond what it had before the model
    shard_bytes: int  # of the model's parameters
    largest_tensor_bytes: int  # of the folder's tensors


def _anonymous_bytes() -> int:
    """Memory that is this process's own; pages of mapped files can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux tells RssAnon")


class _PeakMemory(threading.Thread):
    """Looks at this process's memory again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = _anonymous_bytes()
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(_SAMPLING_SECONDS):
            self.peak = max(self.peak, _anonymous_bytes())

    def stop(self) -> int:
        """The peak beyond the beginning, in bytes."""
        self._end.set()
        self.join()
        return self.peak - self.before


def main() -> None:
    """Convert, and have rank 0 write every rank's figures. Every rank enters."""
    path, flags = Path(sys.argv[1]), sys.argv[2:]
    with started(flags):
        import torch

        from loongplug.convert.rank import convert

        memory = _PeakMemory()
        memory.start()
        begin = time.monotonic()
        converted = convert(flags)
        mine = RankFigures(
            seconds=time.monotonic() - begin,
            peak_memory_bytes=memory.stop(),
            shard_bytes=converted.shard_bytes,
            largest_tensor_bytes=converted.largest_tensor_bytes,
        )
        everyone: list[RankFigures] = [mine] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        if torch.distributed.get_rank() == 0:
            path.write_text(json.dumps([asdict(figures) for figures in everyone]))


if __name__ == "__main__":
    main()
