"""kill -9 at any moment of a save leaves a checkpoint to go on from, bit by bit.

One moment of each kind is tried; with WHOLE_SWEEP in the environment (``scripts/test.sh --all``),
all of them are.
"""

import builtins
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from ranks import RankError, run_ranks

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.training.run import run

RANKS = 2
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

Steps = list[list[float]]  # number and loss of each


@dataclass(frozen=True, kw_only=True)
class Kill:
    """All ranks die when ``rank`` is about to make its ``event``-th change of the kind.

    A change is of the kind that ``operation`` says, or of any, to a file whose name has ``named``.
    """

    rank: int = -1
    event: int = 0
    operation: str = ""
    named: str = ""


def one_step(rank: int, *, flags: list[str], save: Path, kill: Kill) -> Steps:
    """Load, take one step, save."""
    steps: Steps = []
    seen = 0

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if not steps or not changes_files(name, args, save):  # the step is taken, the save begins
            return
        of_kind = kill.operation in ("", name) and any(kill.named in file for file in files(args))
        seen += of_kind
        if rank == kill.rank and of_kind and seen == kill.event:
            (save.parent / "steps.json").write_text(json.dumps(steps))
            for pid in (int(file.name) for file in (save.parent / "pids").iterdir()):
                if pid != os.getpgid(0):
                    os.killpg(pid, signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)  # this rank and the writer that it has started

    (save.parent / "pids" / str(os.getpid())).touch()
    sys.addaudithook(count)
    count_between(count)
    with suppress(SystemExit):  # --exit-interval ends a run so
        run(flags, on_report=lambda report: steps.append([report.iteration, report.loss]))
    return steps


def count_between(count: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Count flushes, too, and the moment when a file is open for writing and still empty."""
    flush, open_file = os.fsync, builtins.open

    def fsync(file: Any) -> None:
        count("os.fsync", (file,))
        flush(file)

    @wraps(open_file)
    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = open_file(file, mode, *args, **kwargs)
        count("open", (file, mode))
        return opened

    os.fsync = fsync
    builtins.open = io.open = open_


def files(args: tuple[Any, ...]) -> list[str]:
    """The names of the files that an event is about; a flushed one is known by its number."""
    known = (
        os.readlink(f"/proc/self/fd/{value}") if isinstance(value, int) and value > 2 else value
        for value in args[:1] + args[1:2] * (len(args) == 4)
    )
    return [Path(os.fsdecode(value)).name for value in known]


def changes_files(name: str, args: tuple[Any, ...], save: Path) -> bool:
    """Whether an event changes files below ``save``, or flushes one."""
    if name == "os.fsync":
        return True
    if name not in CHANGES and not (name == "open" and "w" in str(args[1])):
        return False
    path = Path(str(args[0]))  # relative while a folder is removed
    return path.is_relative_to(save) or not path.is_absolute()


def attempt(flags: list[str], save: Path, kill: Kill = Kill()) -> tuple[Steps, bool]:
    """The steps that one run took, and whether it ended without being killed."""
    pids = save.parent / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    for file in pids.iterdir():
        file.unlink()
    flags = [*flags, "--save", str(save), "--load", str(save)]
    try:
        found = run_ranks(one_step, RANKS, flags=flags, save=save, kill=kill, timeout=120.0)
    except RankError as error:
        if "SIGKILL" not in str(error):
            raise
        return json.loads((save.parent / "steps.json").read_text()), False
    assert all(steps == found[0] for steps in found)
    return found[0], True


@dataclass(frozen=True)
class Reference:
    """What a run that nothing kills does, and its checkpoint after one step."""

    flags: list[str]
    losses: list[list[float]]
    checkpoint: Path


@pytest.fixture(scope="module")
def whole(run_flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    steps = ("--train-iters", "80", "--save-interval", "1", "--exit-interval", "1")
    flags = [*run_flags, *steps, "--use-distributed-optimizer"]
    uninterrupted = [*flags, "--save-interval", "8", "--exit-interval", "8"]
    (losses, _) = attempt(uninterrupted, folder / "whole" / "ckpt")
    assert [number for number, _ in losses] == list(range(1, 9))
    attempt(flags, folder / "one" / "ckpt")
    return Reference(flags, losses, folder / "one" / "ckpt")


class Run:
    """A run that is killed again and again."""

    def __init__(self, whole: Reference, folder: Path) -> None:
        self.whole, self.save, self.latest = whole, folder / "ckpt", 1
        shutil.copytree(whole.checkpoint, self.save)

    def go_on(self, kill: Kill, *more: str) -> bool:
        """Take the next step, from where it has to be, and save; whether it came to its end."""
        steps, ended = attempt([*self.whole.flags, *more], self.save, kill)
        assert steps == [self.whole.losses[self.latest]]
        found = int((self.save / TRACKER).read_text())
        assert found in ((self.latest + 1,) if ended else (self.latest, self.latest + 1))
        self.latest = found
        return ended

    def end(self) -> None:
        """What was killed is gone, and the run after that has nothing to go around."""
        assert self.go_on(Kill())
        assert self.go_on(Kill())
        assert [path.name for path in self.save.iterdir() if path.name.startswith(".")] == []


# Rank, operation and file of the moments that are tried, in an order in which those that remove
# what is left of a killed save find something to remove.
MOMENTS = {
    "folders": [
        Kill(rank=0, event=1, operation="os.mkdir", named=".saving_"),
        Kill(rank=1, event=1, operation="os.mkdir", named=".saving_"),
        Kill(rank=0, event=2, operation="open", named=".distcp"),  # open, and still empty
        Kill(rank=0, event=1, operation="shutil.rmtree", named=".saving_"),
        Kill(rank=1, event=1, operation="os.fsync", named=".distcp"),
        Kill(rank=0, event=1, operation="os.remove"),
        Kill(rank=0, event=1, operation="os.rmdir"),
        Kill(rank=0, event=1, operation="os.rename", named=".metadata"),
        Kill(rank=0, event=2, operation="open", named="metadata.json"),
        Kill(rank=0, event=1, operation="os.rename", named="iter_"),
        Kill(rank=0, event=1, operation="os.fsync", named="ckpt"),
    ],
    "tracker": [
        Kill(rank=0, event=1, operation="open", named=TRACKER),
        Kill(rank=0, event=2, operation="open", named=TRACKER),
        Kill(rank=0, event=1, operation="os.fsync", named=TRACKER),
        Kill(rank=0, event=1, operation="os.rename", named=TRACKER),
        Kill(rank=0, event=2, operation="os.fsync", named="ckpt"),
    ],
}
ASYNC = [
    Kill(rank=1, event=1, operation="open", named=".distcp"),
    Kill(rank=0, event=1, operation="os.fsync", named=".distcp"),
    Kill(rank=0, event=1, operation="os.rename", named=".metadata"),
    Kill(rank=0, event=1, operation="os.fsync", named="ckpt"),
    Kill(rank=0, event=1, operation="os.rename", named=TRACKER),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "more"),
    [(MOMENTS["folders"], ()), (MOMENTS["tracker"], ()), (ASYNC, ("--async-save",))],
    ids=["folders", "tracker", "async"],
)
def test_a_killed_save_leaves_a_checkpoint_to_go_on_from(whole, tmp_path, moments, more):
    killed = Run(whole, tmp_path)
    for kill in moments:
        assert not killed.go_on(kill, *more), f"a save has no moment {kill}"
    killed.end()


@pytest.mark.slow
@pytest.mark.skipif("WHOLE_SWEEP" not in os.environ, reason="takes minutes; scripts/test.sh --all")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["in-step", "async"])
def test_every_moment_of_a_save(whole, tmp_path, rank, more):
    killed, event = Run(whole, tmp_path), 1
    while not killed.go_on(Kill(rank=rank, event=event), *more):
        event += 1
    assert event > 1
    killed.end()


def test_a_moment_of_every_kind_of_change_is_tried():
    tried = {kill.operation for kills in (*MOMENTS.values(), ASYNC) for kill in kills}
    assert tried == {*CHANGES, "open", "os.fsync"}
