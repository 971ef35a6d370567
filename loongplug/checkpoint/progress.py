"""How a long read or write tells how far it is."""

from collections.abc import Callable

OnBytes = Callable[[int, int], None]  # bytes dealt with so far, bytes in all


def ignore_bytes(done: int, total: int) -> None:
    """For callers who show nothing."""
