"""Which rank this process is, by what started it, and the store in which ranks meet.

torchrun serves that store; without torchrun, rank 0 does.
"""

import os
import re
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

# What starters call a process's number, how many there are, and its number on its machine; in a
# Slurm job, mpirun's count. Slurm's are a step's, since a job's script has the job's.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_STARTERS = (
    _NAMES,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a shell in a job is a step of one
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_SERVED = "TORCHELASTIC_USE_AGENT_STORE"  # by torchrun, or by rank 0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # between two looks for a key


def take_rank() -> tuple[int, int]:
    """Rank and world size, once the environment says what another starter says as torchrun does."""
    given = next((each for each in _STARTERS if {*each[:2]} <= {*os.environ}), ())
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not given and "SLURM_PROCID" in os.environ and tasks != "1":
        raise ValueError(
            f"SLURM_NTASKS is {tasks}, but a job's script runs once: start the ranks in it by srun,"
            " or give RANK=0 and WORLD_SIZE=1 for a single rank"
        )
    for name, theirs in zip(_NAMES, given, strict=False):
        if theirs in os.environ:
            os.environ[name] = os.environ[theirs]
    rank, size = this_rank()
    if size > 1 and "MASTER_PORT" not in os.environ:
        job = int(os.environ.get("SLURM_JOB_ID", "9500"))
        os.environ["MASTER_PORT"] = str(20000 + job % 10000)
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    first = re.match(r"([^\[,]+)\[?([^\[\],-]*)", nodes)  # node03 of node[03-05,9]
    if size > 1 and first is not None:
        os.environ.setdefault("MASTER_ADDR", "".join(first.groups()))
    return rank, size


def this_rank() -> tuple[int, int]:
    """RANK and WORLD_SIZE; 0 and 1 without them. Raises ValueError where these are none."""
    rank, size = _number("RANK", "0"), _number("WORLD_SIZE", "1")
    if rank < size and (size == 1 or "RANK" in os.environ):
        return rank, size
    given = [os.environ.get(name, "not given") for name in _NAMES]
    raise ValueError(
        f"RANK is {given[0]} with WORLD_SIZE {given[1]}: expected both, and a number below the size"
    )


def served_store(*, on_gpus: bool) -> TCPStore | None:
    """Where torchrun does not, have rank 0 serve the store of ranks: as long as what is given.

    Ranks that have a default group have met. Raises ValueError where it cannot be.
    """
    rank, size = this_rank()
    if size == 1 or dist.is_initialized() or os.environ.get(_SERVED) == "True":
        return None
    if on_gpus and "LOCAL_RANK" not in os.environ:
        raise ValueError(f"{size} ranks without LOCAL_RANK: give each the number of its GPU")
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise ValueError(f"{size} ranks without MASTER_ADDR: give all the name of rank 0's machine")
    port, store = _number("MASTER_PORT", "0"), None
    try:
        if rank == 0:
            store = TCPStore(address, port, size, True, timedelta(seconds=60), False)
            print(f"Rank 0 of {size} meets the others at {address}:{port}.", flush=True)
    except RuntimeError as error:
        raise ValueError(
            f"MASTER_PORT {port} cannot be served by rank 0, mostly as another rank 0 or program "
            f"uses it: give all ranks another one ({str(error).partition(' (')[0]})"
        ) from error
    # Only now: torch would take another's port for the agent's store.
    os.environ |= {_SERVED: "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.setdefault("LOCAL_RANK", "0")
    return store


def torchrun_store(timeout: timedelta, *, purpose: str = "failure") -> Store:
    """A new connection to the store that torchrun serves to the ranks (MASTER_ADDR, _PORT).

    Keys are of one purpose and of this attempt: torchrun keeps the store when it starts ranks
    again.
    """
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"loongplug/{purpose}/{attempt}", store)


def met_store(rank: int, *, limit: timedelta, purpose: str) -> Store:
    """A :func:`torchrun_store`. ValueError where rank 0 is not there, or two have one rank."""
    try:
        store = torchrun_store(limit, purpose=purpose)
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"rank 0 was not at {where} within {limit}: give all ranks its MASTER_ADDR and one "
            "MASTER_PORT, or see why it did not start"
        ) from error
    this = f"process {os.getpid()} on {socket.gethostname()}"
    first = store.compare_set(f"process/{rank}", "", this).decode()
    if first != this:
        raise ValueError(f"rank {rank} was started twice, as {first} and {this}: start it once")
    return store


def comes(
    store: Store,
    key: str,
    *,
    seconds: float,
    first: float = _FIRST_PAUSE,
    longest: float = _LONGEST_PAUSE,
) -> bool:
    """Whether ``key`` is there before time is up, asked again and again at growing distances.

    These are from ``first`` to ``longest`` seconds.

    A wait of the store's own would print a warning when time is up, and meanwhile let no handler of
    a signal run. Raises RuntimeError when the store is gone.
    """
    until, pause = time.monotonic() + seconds, first
    while not store.check([key]):
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if text.isdecimal():
        return int(text)
    raise ValueError(f"{name} is {text!r}: expected a whole number, not below 0")
