"""kill -9 at any moment of a save leaves a checkpoint to go on from, bit by bit."""

import builtins
import io
import json
import os
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

from loongplug.checkpoint.tracker import TRACKER
from loongplug.training.run import run

RANKS = 2
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

Steps = list[list[float]]  # number and loss of each


@dataclass(frozen=True, kw_only=True)
class Kill:
    """All ranks die when ``rank`` is about to make its ``event``-th change to a file ``named``."""

    rank: int = -1
    event: int = 0
    named: str = ""


def one_step(rank: int, *, flags: list[str], save: Path, kill: Kill) -> Steps:
    """Load, take one step, save."""
    steps: Steps = []
    seen = 0

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if not steps or not changes_files(name, args, save):  # the step is taken, the save begins
            return
        seen += any(kill.named in str(path) for path in args)
        if rank == kill.rank and seen == kill.event:
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
        found = run_ranks(one_step, RANKS, flags=flags, save=save, kill=kill, timeout=60.0)
    except RankError as error:
        if "SIGKILL" not in str(error):
            raise
        return json.loads((save.parent / "steps.json").read_text()), False
    assert all(steps == found[0] for steps in found)
    return found[0], True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "named", "stride", "more"),
    [
        # A stride of 1 tries every moment; these are spread so that the test stays short.
        (0, "", 4, ()),
        (0, TRACKER, 1, ()),
        (1, "", 2, ()),
        (0, "", 6, ("--async-save",)),
    ],
    ids=["first-rank", "tracker", "second-rank", "async"],
)
def test_a_killed_save_leaves_a_checkpoint_to_go_on_from(
    run_flags, tmp_path, rank, named, stride, more
):
    flags = [
        *(*run_flags, "--train-iters", "40", "--save-interval", "1", "--exit-interval", "1"),
        *("--use-distributed-optimizer", *more),
    ]
    (whole, _) = attempt([*flags, "--exit-interval", "4"], tmp_path / "whole" / "ckpt")
    assert [number for number, _ in whole] == [1, 2, 3, 4]
    save = tmp_path / "killed" / "ckpt"
    attempt(flags, save)
    latest, event = 1, 1
    while True:
        steps, ended = attempt(flags, save, Kill(rank=rank, named=named, event=event))
        assert steps == [whole[latest]]
        found = int((save / TRACKER).read_text())
        assert found in ((latest + 1,) if ended else (latest, latest + 1))
        latest = found
        if ended:
            break
        event += stride
    # What was killed is gone, and the run after that has nothing to go around.
    assert event > stride
    assert attempt(flags, save)[0] == [whole[latest]]
    assert [path.name for path in save.iterdir() if path.name.startswith(".")] == []
