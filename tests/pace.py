"""Seconds that do not hang on the machine: held against plain work measured in turn.

A bound in seconds is another bound on a slower machine, or beside other work. What a test says here
is how many times plain Python's work something takes, by the processor's time and by the best of
several turns, of which each measures both.
"""

import time
from collections.abc import Callable

TURNS = 7


def times_slower(
    work: Callable[[], object],
    plain: Callable[[], object],
    *,
    turns: int = TURNS,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """How many times the processor's time of ``plain`` one call of ``work`` takes."""
    best = {work: float("inf"), plain: float("inf")}
    for _ in range(turns):
        for function in best:
            begun = clock()
            function()
            best[function] = min(best[function], clock() - begun)
    return best[work] / best[plain]
