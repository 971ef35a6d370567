"""Ranks for distributed tests: forked from this process, so that nothing is imported again.

``run_ranks`` is for functions of ``(rank, **kwargs)`` that return something picklable. Every
way a rank can end badly (an exception, an exit, a signal, no end at all) becomes one
``RankError`` that shows the rank's traceback and what it printed.
"""

import copy
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from loongplug.verify.ranks import own_thread_pool

# After a rank failed, how long the others may take to end by themselves. What they say then
# is shown too. A gloo peer of a dead rank fails at once, but beside other work it takes its time to
# say so; only ranks that hang take all of this.
GRACE_SECONDS = 10.0
STACKS_SECONDS = 20.0  # for ranks that hang to write where they are
OUTPUT_LINES = 40


class RankError(Exception):
    """A rank failed, died or did not end. ``errors`` maps each such rank to what it said."""

    def __init__(self, message: str, *, rank: int, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = errors


@dataclass(frozen=True)
class _Report:
    """What a rank leaves behind: a result, or a traceback with the time it was raised at."""

    result: Any = None
    error: str | None = None
    time: float = 0.0


@dataclass
class _Rank:
    rank: int
    pid: int
    pidfd: int
    folder: Path
    status: int | None = None  # as os.waitpid gives it
    killed: bool = False  # by the parent
    report: _Report | None = field(default=None)

    def read(self, suffix: str) -> str:
        path = self.folder / f"{self.rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    def reap(self, *, block: bool) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            if pid == 0:
                return False
            self.status = status
            os.close(self.pidfd)
            path = self.folder / f"{self.rank}.pickle"
            if path.exists():
                self.report = pickle.loads(path.read_bytes())
        return True

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank and the processes that it started (its process group)."""
        self.killed = self.killed or self.status is None
        for target in (-self.pid, self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(target, signal.SIGKILL)

    def failure(self) -> str | None:
        """What went wrong, as seen after its end; None when it gave its result."""
        if self.report is not None and self.report.error is not None:
            return self.report.error
        if self.status == 0 and self.report is not None:
            return None
        if self.killed:
            return None if self.report is not None else "was still running and was stopped"
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        if code < 0:
            return f"was killed by signal {signal.Signals(-code).name}"
        return f"exited with code {code} and returned nothing"


def run_ranks(
    function: Callable[..., Any], world_size: int, *, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """``[function(rank, **kwargs) for rank in range(world_size)]``, each in its own process.

    Each rank has a gloo process group over all ranks, RANK, LOCAL_RANK and WORLD_SIZE set, and
    no model-parallel state. What ranks print is printed here when they are done. Raises
    RankError; after ``timeout`` seconds with the stacks of the ranks that still run.
    """
    if dist.is_initialized() or parallel_state.model_parallel_is_initialized():
        raise RuntimeError("run_ranks needs a parent without process groups and parallel state")
    torch.set_num_threads(1)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="loongplug-ranks-") as name:
        folder = Path(name)
        ranks: list[_Rank] = []
        try:
            # A rank's collections leave alone what was there before: looking at every module that
            # is loaded would take time, and copy the pages that ranks share.
            gc.freeze()
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    _run_rank(function, rank, world_size, folder, timeout, kwargs)
                ranks.append(_Rank(rank, pid, os.pidfd_open(pid), folder))
            stuck = _wait(ranks, timeout)
        finally:
            gc.unfreeze()
            for each in ranks:
                each.kill()
                each.reap(block=True)
        _raise_failure(ranks, stuck, timeout)
        for each in ranks:
            if output := each.read("output"):
                print(f"[rank {each.rank}]", output, sep="\n", end="")
        return [each.report.result for each in ranks if each.report is not None]


def _wait(ranks: list[_Rank], timeout: float) -> list[_Rank]:
    """Until all ended, or the bound, or a short while after one failed; returns the stuck."""
    deadline = time.monotonic() + timeout
    failed = False
    while alive := [rank for rank in ranks if not rank.reap(block=False)]:
        if not failed and any(r.status is not None and r.failure() for r in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        left = deadline - time.monotonic()
        if left <= 0:
            return [] if failed else _stacks_of(alive)
        poll = select.poll()
        for rank in alive:
            poll.register(rank.pidfd, select.POLLIN)
        poll.poll(left * 1000)
    return []


def _stacks_of(alive: list[_Rank]) -> list[_Rank]:
    """Have each rank write its stacks (see ``_run_rank``), and wait a little for that."""
    for rank in alive:
        rank.signal(signal.SIGUSR1)
    until, before = time.monotonic() + STACKS_SECONDS, [""]
    while time.monotonic() < until:
        stacks = [rank.read("stacks") for rank in alive]
        if all(stacks) and stacks == before:  # whole: none of them grows any more
            break
        before = stacks
        time.sleep(0.1)
    return alive


def _raise_failure(ranks: list[_Rank], stuck: list[_Rank], timeout: float) -> None:
    if stuck:
        errors = {r.rank: f"was stopped here:\n{r.read('stacks')}" for r in stuck}
        names = ", ".join(str(r.rank) for r in stuck)
        message = f"after {timeout:g} s these ranks still ran: {names}\n"
        raise RankError(message + _sections(ranks, errors), rank=stuck[0].rank, errors=errors)
    errors = {r.rank: text for r in ranks if (text := r.failure()) is not None}
    if not errors:
        return
    # The first to fail is the cause; what its peers say is mostly that it is gone.
    first = min(errors, key=lambda rank: _time_of(ranks[rank]))
    ordered = {first: errors.pop(first), **errors}
    raise RankError(
        f"rank {first} failed\n" + _sections(ranks, ordered), rank=first, errors=ordered
    )


def _time_of(rank: _Rank) -> tuple[bool, float]:
    """Sorts ranks by when they failed; those that left no time come before those stopped."""
    if rank.report is not None and rank.report.error is not None:
        return (False, rank.report.time)
    return (rank.killed, float("-inf"))


def _sections(ranks: list[_Rank], errors: dict[int, str]) -> str:
    parts = []
    for rank, text in errors.items():
        parts.append(f"----- rank {rank} -----\n{text.rstrip()}")
        lines = ranks[rank].read("output").splitlines()
        if lines:
            shown = "\n".join(lines[-OUTPUT_LINES:])
            parts.append(f"----- rank {rank} printed -----\n{shown}")
    return "\n".join(parts)


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    timeout: float,
    kwargs: dict[str, Any],
) -> NoReturn:
    """The life of a forked rank; never returns into the code it was forked from."""
    code = 1
    try:
        _own_process(rank, world_size, folder)
        own_thread_pool()
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                # The parent's bound comes first: it shows what every rank does.
                timeout=timedelta(seconds=timeout + GRACE_SECONDS),
            )
            result = function(rank, **kwargs)
            _leave(folder, rank, _Report(result=result))
            code = 0
            # A rank that goes early would take its sockets from those that still talk.
            if dist.is_initialized():
                dist.barrier()
        except BaseException:
            error = traceback.format_exc()
            if code:  # else: a peer failed while this rank, its work done, waited for it
                _leave(folder, rank, _Report(error=error, time=time.monotonic()))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _own_process(rank: int, world_size: int, folder: Path) -> None:
    """Own process group, output, signals and environment; ends when the parent does."""
    os.setpgid(0, 0)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = os.open(folder / f"{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))


def _leave(folder: Path, rank: int, report: _Report) -> None:
    """Write the report whole or not at all."""
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(report))
    part.rename(folder / f"{rank}.pickle")


@contextmanager
def model_parallel(
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
) -> Iterator[None]:
    """Megatron's parallel state and RNG tracker (seed 123) inside a rank; as before afterwards."""
    before = {
        name: copy.copy(value)
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    try:
        model_parallel_cuda_manual_seed(123)
        yield
    finally:
        get_cuda_rng_tracker().reset()
        parallel_state.destroy_model_parallel()
        # destroy_model_parallel forgets some: rank lists, hierarchical groups and others
        vars(parallel_state).update(before)
