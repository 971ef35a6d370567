"""Two programs do their steps in turn, so that what the machine does beside them meets both.

Both run at the same time, and only one of them works at any moment: a side that has done a step
says so and waits until the other one has done its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Step:
    """A side's step, and what the side says of it.

    ``seconds`` of the wall, from the word that it may begin; ``processor``: seconds that its ranks
    together were at work, to which other work beside them adds little.
    """

    seconds: float
    processor: float
    loss: float
    tokens: int = 0  # where somebody asks

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds


class Side:
    """A process that does a step for each line that it is sent."""

    def __init__(
        self, words: Sequence[object], *, environment: Mapping[str, str], folder: Path | None = None
    ) -> None:
        """``words`` are Python's; behind them it is given the file descriptor to :func:`tell`."""
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *map(str, words), str(write)],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(write,),
        )
        os.close(write)
        self._done = os.fdopen(read)
        self._since, self._worked = time.perf_counter(), 0.0

    def step(self) -> Step:
        """The step under way, at its end; the side rests behind it."""
        line = self._done.readline()
        if not line:
            raise RuntimeError("A side ended too early; its messages stand above.")
        # By this clock: a side's own time between two reports has the other one's step in it.
        seconds, before = time.perf_counter() - self._since, self._worked
        self._worked = _processor_seconds(self._process.pid)
        return Step(seconds, self._worked - before, *json.loads(line))

    def go(self) -> None:
        """The next step may begin."""
        assert self._process.stdin is not None
        self._since = time.perf_counter()
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Wait for the process's end."""
        if self._process.wait():
            raise RuntimeError("A side failed; its messages stand above.")


def _processor_seconds(pid: int) -> float:
    """Of a process and those that it has started, since they started."""
    root = psutil.Process(pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def in_turn(sides: tuple[Side, Side], *, warmup: int, steps: int) -> list[tuple[Step, Step]]:
    """The last ``steps`` of ``warmup + steps`` of both, whose losses have to agree."""
    for side in sides:
        side.step()  # both have started: from here on one works at a time
    found = []
    for _ in range(warmup - 1 + steps):
        took = []
        for side in sides:
            side.go()
            took.append(side.step())
        assert abs(took[0].loss - took[1].loss) < 1e-5, took
        found.append((took[0], took[1]))
    for side in sides:
        side.go()
        side.end()
    return found[warmup - 1 :]


def tell(loss: float, tokens: int, *, done: int) -> None:
    """A side's end of a step: it writes to ``done``, and waits for a line of its input."""
    os.write(done, json.dumps([loss, tokens]).encode() + b"\n")
    sys.stdin.readline()
