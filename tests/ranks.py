"""Ranks for distributed tests: the product's forked ones, each in a gloo process group.

``run_ranks`` is for functions of ``(rank, **kwargs)`` that return something picklable. Every
way a rank can end badly (an exception, an exit, a signal, no end at all) becomes one
``RankError`` that shows the rank's traceback and what it printed.
"""

import copy
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import OnEvent, Rank, failed_ranks, fork_ranks

# After a rank failed, how long the others may take to end by themselves. What they say then
# is shown too. A gloo peer of a dead rank fails at once, but beside other work it takes its time to
# say so; only ranks that hang take all of this.
GRACE_SECONDS = 30.0
STACKS_SECONDS = 20.0  # for ranks that hang to write where they are
OUTPUT_LINES = 40


class RankError(Exception):
    """A rank failed, died or did not end. ``errors`` maps each such rank to what it said."""

    def __init__(self, message: str, *, rank: int, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = errors


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
    _preload()
    with tempfile.TemporaryDirectory(prefix="loongplug-ranks-") as name:
        stuck: dict[int, str] = {}
        ranks = fork_ranks(
            partial(_in_group, function, kwargs, folder=Path(name), timeout=timeout),
            world_size,
            folder=Path(name),
            timeout=timeout,
            grace=GRACE_SECONDS,
            on_timeout=lambda alive: stuck.update(_stacks_of(alive)),
        )
        if stuck:
            names = ", ".join(map(str, stuck))
            message = f"after {timeout:g} s these ranks still ran: {names}\n"
            raise RankError(message + _sections(ranks, stuck), rank=min(stuck), errors=stuck)
        if failed := failed_ranks(ranks):
            errors = {each.number: str(each.fault) for each in failed}
            first = failed[0].number
            message = f"rank {first} failed\n" + _sections(ranks, errors)
            raise RankError(message, rank=first, errors=errors)
        for each in ranks:
            if lines := each.printed:
                print(f"[rank {each.number}]", *lines, sep="\n")
        return [each.report["result"] for each in ranks if each.report is not None]


@cache
def _preload() -> None:
    """Import once, before the first ranks, what each would import again."""
    preload("cpu")


def _in_group(
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    rank: int,
    tell: OnEvent,
    *,
    folder: Path,
    timeout: float,
) -> Any:
    """What a rank does: the function, within a process group."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.enable(file=2)
    stacks = os.open(_stacks(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        # The parent's bound comes first: it shows what every rank does.
        timeout=timedelta(seconds=timeout + GRACE_SECONDS),
    )
    result = function(rank, **kwargs)
    # A rank that goes early would take its sockets from those that still talk. That a peer failed
    # while this rank, its work done, waited for it is the peer's to say.
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()
    return result


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stacks"


def _stacks_of(alive: list[Rank]) -> dict[int, str]:
    """Have each rank write its stacks (see ``_in_group``), and wait a little for that."""
    files = {rank.number: _stacks(rank.folder, rank.number) for rank in alive}
    for rank in alive:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    until, before = time.monotonic() + STACKS_SECONDS, [""]
    while time.monotonic() < until:
        stacks = [
            file.read_text(errors="replace") if file.exists() else "" for file in files.values()
        ]
        if all(stacks) and stacks == before:  # whole: none of them grows any more
            break
        before = stacks
        time.sleep(0.1)
    return {
        number: f"was stopped here:\n{written}"
        for number, written in zip(files, stacks, strict=True)
    }


def _sections(ranks: list[Rank], errors: dict[int, str]) -> str:
    parts = []
    for rank, text in errors.items():
        parts.append(f"----- rank {rank} -----\n{text.rstrip()}")
        if lines := ranks[rank].printed:
            shown = "\n".join(lines[-OUTPUT_LINES:])
            parts.append(f"----- rank {rank} printed -----\n{shown}")
    return "\n".join(parts)


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
        name: copy.copy(value) if isinstance(value, list | dict) else value
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
