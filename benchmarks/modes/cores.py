"""A core for each rank, where there are enough of them."""

import os


def on_own_core(rank: int) -> bool:
    """Have this process stay on the ``rank``-th core that it may use; False where there is none."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))
    if rank >= len(cores):
        return False
    os.sched_setaffinity(0, {cores[rank]})
    return True
