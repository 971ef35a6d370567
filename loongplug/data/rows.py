"""Where rows come from."""

from pathlib import Path
from typing import Any, Protocol


class Rows(Protocol):
    """Rows of one or several files, by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """The row; ValueError with its place when it is no JSON object."""
        ...

    def where(self, index: int) -> str:
        """``path:line`` of the row, for messages."""
        ...

    def media_root(self, index: int) -> Path:
        """What relative paths in the row start at."""
        ...
