"""Makes a draw's fault happen within a rank, by patching what the rank will call."""

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from draws import Draw, exchanges_features
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from loongplug.checkpoint.atomic_saves import AtomicSaves
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.media_loader import UnitLoader
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executor import Executor
from loongplug.hetero.wire import Wire
from loongplug.models.decoder import TextDecoder
from loongplug.models.multimodal import MultimodalModel
from loongplug.training.provider import ModelProvider

PLACES: dict[str, tuple[Any, str]] = {
    "build": (ModelProvider, "__call__"),
    "data": (MicrobatchLoader, "__next__"),
    "unit": (UnitLoader, "__call__"),
    "encoder": (MultimodalModel, "_encoded"),  # on any stage of an encoder
    "decoder": (TextDecoder, "forward"),
    "backward": (schedules, "backward_step"),
    "optimizer": (ChainedOptimizer, "step"),
    "save": (AtomicSaves, "_begin"),
    "saved": (AtomicSaves, "_finish"),
}
MESSAGE = "this rank is unwell"
NO_SPACE = os.strerror(errno.ENOSPC)
FULL_DISKS = ("full disk", "output")


class BuiltIn:
    """A draw's fault in one rank. ``step`` is told each step that has begun."""

    def __init__(self, draw: Draw, *, rank: int, save: Path, fired: Path) -> None:
        """``fired`` is the file that says in which step it has happened."""
        self._fault = draw.fault
        self._save = save
        self._fired = fired
        self._step = 0 if draw.fault.place == "build" else 1
        self._seen = 0
        if rank not in draw.fault.ranks:
            return
        if draw.fault.kind in FULL_DISKS:
            self._fill_the_disk()
            return
        owner, name = PLACES.get(draw.fault.place) or exchange_of(draw)
        before(owner, name, self._come_by)

    def begin(self, step: int) -> None:
        """``step`` begins; the save of the one before it has begun, too."""
        self._step = step

    def _counts(self) -> bool:
        """Whether this is the time."""
        due = self._fault.step + (self._fault.kind in FULL_DISKS)
        if self._fault.place == "build" or self._step >= due:
            self._seen += 1
            if self._seen == self._fault.at:
                self._fired.write_text(str(self._step))
                return True
        return False

    def _come_by(self) -> None:
        if not self._counts():
            return
        if self._fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault.kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise RuntimeError(MESSAGE)

    def _fill_the_disk(self) -> None:
        """From the chosen moment on no file of the save folder can be opened (written, flushed)."""
        way = self._fault.way
        full = False

        def meets() -> bool:
            nonlocal full
            full = full or self._counts()
            return full

        if way == "flush":
            flush = os.fsync

            def fsync(file: Any) -> None:
                if meets():
                    raise OSError(errno.ENOSPC, NO_SPACE)
                flush(file)

            os.fsync = fsync
            return
        open_file = builtins.open

        @wraps(open_file)
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            concerned = "w" in mode and not isinstance(file, int) and self._below(file)
            if not concerned or not meets():
                return open_file(file, mode, *args, **kwargs)
            if way != "write":
                raise OSError(errno.ENOSPC, NO_SPACE, os.fspath(file))
            full_file = io.BufferedWriter(_Full(file, "w"))
            return full_file if "b" in mode else io.TextIOWrapper(full_file)

        builtins.open = io.open = open_

    def _below(self, file: Any) -> bool:
        return Path(os.fsdecode(file)).is_relative_to(self._save)


class _Full(io.FileIO):
    """A file on a disk that has room for half of what is first written."""

    full = False

    def write(self, data: Any) -> int:
        """The half; then nothing."""
        half = memoryview(data)[: len(data) // 2]
        if self.full or not half:
            raise OSError(errno.ENOSPC, NO_SPACE)
        self.full = True
        return super().write(half)


def exchange_of(draw: Draw) -> tuple[Any, str]:
    """What a mode exchanges features with; else, what stages exchange hidden states with."""
    if draw.cell.own:
        return Wire, "_span"
    if draw.cell.schedule == "auto":  # by one of two ways, as the step's plan has it
        return Executor, "do"
    if exchanges_features(draw.cell):
        return AllToAll, "_move"
    return P2PCommunicator, "_communicate"


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Have ``act`` called before each call of ``owner``'s function ``name``."""
    original = getattr(owner, name)

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, called)
