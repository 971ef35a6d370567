"""How video and sound files are opened by PyAV, which the extra ``video`` installs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal

from loongplug.data.media_files import MediaFile, opened_media
from loongplug.data.object_store import DataSourceError


@dataclass(frozen=True, kw_only=True)
class AvKind:
    """A kind of stream: what may hold it, and what users are told where it cannot be read."""

    name: Literal["video", "audio"]
    containers: tuple[str, ...]  # all that are opened, by FFmpeg's names
    without_av: str  # what is so of the file where PyAV is missing, and what helps
    damaged: str  # what is so of it where FFmpeg cannot read it
    cure: str  # what then helps


def imported_av(path: MediaFile, kind: AvKind, *, where: str) -> Any:
    """PyAV; ValueError with ``where`` and what helps where it is missing."""
    try:
        import av
    except ImportError as error:
        raise ValueError(f"{where}: {path} {kind.without_av}.") from error
    return av


@contextmanager
def opened_stream(
    kind: AvKind, path: MediaFile, *, where: str, header: bool = False
) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of this kind; what goes wrong inside says ``where``, too.

    ``header`` is as of :func:`opened_media`.
    """
    av = imported_av(path, kind, where=where)
    # FFmpeg's playlists, patterns of names and scripts lead to other files, and to the network.
    options = {"format_whitelist": ",".join(kind.containers), "protocol_whitelist": "file"}
    with opened_media(kind.name, path, where=where, header=header) as file:
        # By its descriptor, which PyAV reads quicker than through Python; never by its name, which
        # may be an address to FFmpeg, and a link to another file by now.
        # Members of archives, and files that are fetched piece by piece, have none.
        raw = getattr(file, "raw", None)
        source = f"/proc/self/fd/{file.fileno()}" if isinstance(raw, FileIO) else file
        try:
            with av.open(source, container_options=options) as container:
                streams = getattr(container.streams, kind.name)
                if not streams:
                    raise ValueError(f"it has no {kind.name} stream")
                yield container, streams[0]
        except DataSourceError:
            raise
        # Of damaged files, decoders raise any kind, MemoryError among them.
        except Exception as error:
            # FFmpeg's own words, without the descriptor.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ValueError(
                f"{where}: {kind.name} {path} {kind.damaged} ({reason}): {kind.cure}."
            ) from error
