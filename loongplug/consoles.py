"""Where commands print tables."""

from rich.console import Console

_PIPED = 10_000  # columns: no table is wider, and readers of the pipe break lines themselves


def table_console(*, least: int = 0, stderr: bool = False) -> Console:
    """A console that cuts no table where its output is not a terminal.

    On a terminal it is as wide as that, and at least ``least`` columns.
    """
    console = Console(stderr=stderr)
    width = max(console.width, least) if console.is_terminal else _PIPED
    return Console(stderr=stderr, width=width)
