"""Progress bars of commands that fork ranks."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def threadless_bars(
    console: Console | None = None, *, estimates: bool = False, transient: bool = True
) -> Progress:
    """Bars on ``console`` (stderr without one); nothing where it is not a terminal.

    No thread draws them, since a thread would be there when ranks are forked: whoever moves a bar
    calls ``refresh``. ``estimates`` shows the time that is left instead of the time it took so far.
    """
    shown = Console(stderr=True) if console is None else console
    clock: ProgressColumn = TimeRemainingColumn() if estimates else TimeElapsedColumn()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        clock,
        console=shown,
        auto_refresh=False,
        disable=not shown.is_terminal,
        transient=transient,
    )
