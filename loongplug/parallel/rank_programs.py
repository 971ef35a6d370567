"""Our modules that run as ranks, and the command lines that start them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loongplug.platform import requested_device

_OURS = ("loongplug.train", "loongplug.convert.worker", "loongplug.bench.step")
_PACKAGE = Path(__file__).resolve().parents[1]
# What torchrun tells a rank. Port 0: the rank takes one that is free.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def ranks_command(*program: str, ranks: int) -> list[str]:
    """What starts ``ranks`` processes of a program (``-m``, its module, its words) here."""
    launcher = ("-m", "loongplug.parallel.launch", "--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, *launcher, *program]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of our modules in torchrun's command line: ``launcher -m MODULE flags``, or its path."""

    launcher: list[str]
    path: str
    flags: list[str]

    @property
    def alone(self) -> bool:
        """Whether the program is a single rank, which does not need torchrun."""
        return "--standalone" in self.launcher and "--nproc-per-node=1" in self.launcher

    @property
    def can_be_forked(self) -> bool:
        """A process that has asked for its GPUs cannot be forked, so only ``--device cpu`` is."""
        try:
            return "--standalone" in self.launcher and requested_device(self.flags) == "cpu"
        except ValueError:  # the ranks will say so
            return False

    def forked(self) -> list[str]:
        """torchrun's words for ranks that are forked from one process."""
        how = ("--start-method=forkserver", "--run-path", self.path)
        return [*self.launcher, *how, *self.flags]


def program_of(words: Sequence[str]) -> Program | None:
    """Our program in torchrun's words, or None where they name another."""
    for module in _OURS:
        path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for at, word in enumerate(words):
            by_name = word == module and at > 0 and words[at - 1] == "-m"
            if by_name or (word.endswith(".py") and Path(word).resolve() == path):
                before = words[: at - 1 if by_name else at]
                flags = [*words[at + 1 :]]
                return Program(launcher=[*before], path=str(path), flags=flags)
    return None
