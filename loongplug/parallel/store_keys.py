"""Waiting for a key of a store that may not come."""

import time

from torch.distributed import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


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
