"""One run on forked ranks, and how each of them ended."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ranks
import torch.distributed as dist
from built_in_faults import BuiltIn
from draws import Draw
from parity.cells import Cell
from prepared import Prepared
from torch.distributed import TCPStore

from loongplug.parallel import failure
from loongplug.training.run import run

# A run takes a second or two. These only bound one that hangs, where others keep the machine busy.
RUN_SECONDS = 240.0
ENDING_SECONDS = 60.0  # of the others, once one rank has ended
# In tests ranks listen more often to each other, and wait less long for one that is dead.
WATCH_SECONDS, PARTING_SECONDS, TURN_SECONDS = 0.05, 0.3, 0.2

WHOLE, TERMINATED, FAILED = "whole", "terminated", "failed"

Losses = dict[int, float]  # by step


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended: of each rank the way, the losses it reported, and what it printed."""

    ways: list[str]
    losses: list[Losses]
    said: list[str]
    fired: bool  # whether the draw's fault has happened
    fired_in: int = 0  # the last step in which it has, counted from 1
    details: str = ""


class Agent:
    """What torchrun's agent is to the ranks that it starts: a store, the same for each attempt."""

    def __init__(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._attempts = 0

    def environment(self) -> dict[str, str]:
        """Of the ranks of the next attempt."""
        self._attempts += 1
        return {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts - 1),
        }


def attempt(
    folder: Path,
    cell: Cell,
    flags: list[str],
    *,
    prepared: Prepared,
    draw: Draw | None = None,
    save: Path | None = None,
    agent: Agent | None = None,
    otherwise: list[str] | None = None,
) -> Ending:
    """Run ``flags`` on the ranks of ``cell``, with the fault of ``draw`` where there is one.

    ``save`` is where its disk is full. With an ``agent``, ranks find each other through its store,
    as torchrun's do. ``otherwise``: the flags of the draw's victims, who are started differently.
    """
    prepared.model(flags)
    folder.mkdir(parents=True)
    options = {"flags": flags, "folder": folder, "draw": draw, "save": save, "prepared": prepared}
    options["agent"] = agent.environment() if agent else {}
    options["otherwise"] = otherwise
    numbers = range(cell.ranks)
    for rank in numbers:
        (folder / f"{rank}.said").touch()
    details = ""
    try:
        with mock.patch.object(ranks, "GRACE_SECONDS", ENDING_SECONDS):
            ways = ranks.run_ranks(life, cell.ranks, timeout=RUN_SECONDS, **options)
    except ranks.RankError as error:
        details = str(error)
        # A rank that gave its result is not among the errors.
        found = {rank: text.strip().splitlines()[-1] for rank, text in error.errors.items()}
        ways = [found.get(rank, WHOLE) for rank in numbers]
    said = [(folder / f"{rank}.said").read_text(errors="replace") for rank in numbers]
    ways = [_way(way) for way in ways]
    # A rank that is killed may leave an empty file.
    fired = [int(file.read_text() or 0) for file in folder.glob("*.fired")]
    return Ending(
        ways=ways,
        losses=[_losses(folder / f"{rank}.losses") for rank in numbers],
        said=said,
        fired=bool(fired),
        fired_in=max(fired, default=0),
        details=details + "\n".join(f"--- rank {r}\n{said[r][-4000:]}" for r in numbers),
    )


def life(
    rank: int,
    *,
    flags: list[str],
    folder: Path,
    draw: Draw | None,
    save: Path | None,
    prepared: Prepared,
    agent: dict[str, str],
    otherwise: list[str] | None,
) -> str:
    """A rank's, as ``loongplug/train.py`` has it."""
    if draw is not None and otherwise is not None and rank in draw.fault.ranks:
        flags = otherwise
    said = os.open(folder / f"{rank}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(said, 1)
    os.dup2(said, 2)
    prepared.use()
    failure.WATCH_SECONDS, failure.PARTING_SECONDS = WATCH_SECONDS, PARTING_SECONDS
    failure.TURN_SECONDS = TURN_SECONDS
    fault = None
    if draw is not None and save is not None:
        fault = BuiltIn(draw, rank=rank, save=save, fired=folder / f"{rank}.fired")
    if draw is not None and draw.fault.kind == "kill" and draw.fault.place == "build":
        threading.Thread(target=_end_after, args=(folder, draw), daemon=True).start()
    losses = (folder / f"{rank}.losses").open("a", buffering=1)

    def note(report: object) -> None:
        losses.write(json.dumps([report.iteration, report.loss]) + "\n")
        if fault is not None:
            fault.begin(report.iteration + 1)

    world_size = dist.get_world_size()
    store = lambda timeout: dist.FileStore(str(folder / "board"), world_size)  # noqa: E731
    if agent:
        dist.barrier()  # a group that goes takes its sockets from those that still connect
        dist.destroy_process_group()  # the run makes its own
        os.environ.update(agent)
    with failure.failure_board(None if agent else store) as at_end:
        try:
            run(flags, on_report=note, at_end=at_end)
        except SystemExit as ended:
            if ended.code not in (0, None):
                raise
            return TERMINATED
    if world_size == 1:  # for the parent to import before it forks the next ranks
        (folder / "modules").write_text(json.dumps(sorted(sys.modules)))
    return WHOLE


def _end_after(folder: Path, draw: Draw) -> None:
    """End this rank as torchrun does once another has died: by SIGTERM, and if that is in vain, by
    SIGKILL.

    Ranks that train hear of a dead one themselves. Before that, while their groups are made, each
    waits for the others in torchrun's store, where Python's own handlers of SIGTERM do not run.
    """
    while not all((folder / f"{rank}.fired").exists() for rank in draw.fault.ranks):
        time.sleep(0.05)
    for how in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(1.0)
        os.kill(os.getpid(), how)
    time.sleep(5.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _way(text: str) -> str:
    """How a rank ended, in a word."""
    if text in (WHOLE, TERMINATED):
        return text
    if text.startswith("exited with code 1 ") or text == "SystemExit: 1":
        return FAILED
    for name in ("SIGKILL", "SIGTERM"):
        if text == f"was killed by signal {name}":
            return name
    return text


def _losses(file: Path) -> Losses:
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(json.loads(line) for line in lines)
