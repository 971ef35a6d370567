"""Where commands print tables, and their progress bars."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining

_PIPED = 10_000  # columns: no table is wider, and readers of the pipe break lines themselves


def table_console(*, least: int = 0, stderr: bool = False) -> Console:
    """A console that cuts no table where its output is not a terminal.

    On a terminal it is as wide as that, and at least ``least`` columns.
    """
    console = Console(stderr=stderr)
    width = max(console.width, least) if console.is_terminal else _PIPED
    return Console(stderr=stderr, width=width)


def threadless_bars(
    console: Console | None = None, *, estimates: bool = False, transient: bool = True
) -> Progress:
    """Bars on ``console`` (stderr without one); nothing where it is not a terminal.

    No thread draws them, since a thread would be there when ranks are forked: whoever moves a bar
    calls ``refresh``. ``estimates`` shows the time that is left instead of the time it took so far.
    """
    shown = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *(*columns, Remaining() if estimates else Elapsed()),
        console=shown,
        auto_refresh=False,
        disable=not shown.is_terminal,
        transient=transient,
    )
