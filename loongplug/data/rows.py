"""Where rows come from."""

from typing import Any, Protocol

from loongplug.data.media_files import MediaRoot


class Rows(Protocol):
    """Rows of one or several files, by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """The row; ValueError with its place when it is no JSON object."""
        ...

    def where(self, index: int) -> str:
        """``path:line`` of the row, for messages."""
        ...

    def media_root(self, index: int) -> MediaRoot:
        """What the names of images and videos in the row start at."""
        ...
