"""Where the host waits for the device, by the line that makes it wait."""

import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

import loongplug

_PACKAGE = Path(loongplug.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A line, and how often the host waited there; of that, before the optimizer began."""

    where: str
    times: int
    before_update: int


class Waits:
    """``torch.cuda.set_sync_debug_mode("warn")``, from when it is made until :meth:`end`."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._found: Counter[str] = Counter()
        self._before_update: Counter[str] = Counter()
        self._kept = warnings.catch_warnings()
        self._kept.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._see  # catch_warnings puts the other one back
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")

    def update_begins(self) -> None:
        """Microbatches are done: what waits from now on is the optimizer's."""
        self._before_update = Counter(self._found)

    def end(self) -> tuple[Wait, ...]:
        """What was found, the most frequent first."""
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self._kept.__exit__(None, None, None)
        return tuple(
            Wait(where=where, times=times, before_update=self._before_update[where])
            for where, times in self._found.most_common()
        )

    def _see(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._found[line_of(traceback.extract_stack(), filename=filename, lineno=lineno)] += 1


def line_of(stack: Sequence[traceback.FrameSummary], *, filename: str, lineno: int) -> str:
    """The innermost line of this project, and the line that warned where that is another's."""
    own = [frame for frame in stack if Path(frame.filename).is_relative_to(_PACKAGE)]
    warned = f"{_short(Path(filename))}:{lineno}"
    if not own:
        return warned
    mine = f"{_short(Path(own[-1].filename))}:{own[-1].lineno}"
    return mine if mine == warned else f"{mine} ({warned})"


def _short(path: Path) -> str:
    """From the package on: the folders above it are the machine's."""
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE.parent))
    packages = [number for number, part in enumerate(path.parts) if part == "site-packages"]
    return "/".join(path.parts[packages[-1] + 1 :] if packages else path.parts[-2:])
