"""How far a conversion is, in bytes."""

from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from loongplug.checkpoint.hf_gather import OnBytes, ignore_bytes


class ByteProgress:
    """A bar for each long part, on a terminal; one line for each elsewhere."""

    def __init__(self, terminal: TextIO, *, shown: bool) -> None:
        self._shown = shown
        self._console = Console(file=terminal)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def of(self, part: str) -> OnBytes:
        """What a reader or a writer calls as it goes on."""
        if not self._shown:
            return ignore_bytes
        task = self._progress.add_task(part, total=None)

        def on_bytes(done: int, total: int) -> None:
            self._progress.update(task, completed=done, total=total)
            if done == total and not self._console.is_terminal:
                self._console.print(f"{part}: {total / 2**20:,.1f} MiB", highlight=False)

        return on_bytes
