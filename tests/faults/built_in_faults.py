"""Makes a draw's fault happen within a rank, by patching what the rank will call."""

import builtins
import errno
import io
import os
import signal
from functools import wraps
from pathlib import Path
from typing import Any

from draws import Draw, exchanges_features
from parity.built_in import around

PLACES = {
    "build": "loongplug.training.provider:ModelProvider.__call__",
    "data": "loongplug.data.loader:MicrobatchLoader.__next__",
    "unit": "loongplug.data.media_loader:UnitLoader.__call__",
    "encoder": "loongplug.models.multimodal:MultimodalModel._encoded",  # on any stage of an encoder
    "decoder": "loongplug.models.decoder:TextDecoder.forward",
    "backward": "megatron.core.pipeline_parallel.schedules:backward_step",
    "optimizer": "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
    "save": "loongplug.checkpoint.atomic_saves:AtomicSaves._begin",
    "saved": "loongplug.checkpoint.atomic_saves:AtomicSaves._finish",
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
        around(PLACES.get(draw.fault.place) or exchange_of(draw), self._come_by)

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

    def _come_by(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._counts():
            if self._fault.kind == "exception":
                raise RuntimeError(MESSAGE)
            os.kill(
                os.getpid(), {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM}[self._fault.kind]
            )
        return original(*args, **kwargs)

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


def exchange_of(draw: Draw) -> str:
    """What a mode exchanges features with; else, what stages exchange hidden states with."""
    if draw.cell.own:
        return "loongplug.hetero.wire:Wire._span"
    if draw.cell.schedule == "auto":  # by one of two ways, as the step's plan has it
        return "loongplug.hetero.executor:Executor.do"
    if exchanges_features(draw.cell):
        return "loongplug.hetero.exchange:AllToAll._move"
    return "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate"
