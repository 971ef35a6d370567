"""How video and sound files are opened by PyAV, which the extra ``video`` installs."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Any, Literal

from loongplug.data.media_files import MediaFile, opened_media
from loongplug.data.object_store import DataSourceError

Stream = Literal["video", "audio"]
# All containers that are opened, by FFmpeg's names. Its playlists, patterns of names and scripts
# (hls, concat, image2) lead to other files, and to the network.
_CONTAINERS: dict[Stream, tuple[str, ...]] = {
    "video": ("mov", "matroska", "webm", "avi", "mpegts", "mpeg", "ogg", "flv", "asf", "gif"),
    "audio": (
        *("wav", "w64", "mp3", "flac", "ogg", "aac", "aiff", "au"),
        *("mov", "matroska", "webm", "asf", "avi"),
    ),
}


def imported_av(path: MediaFile, *, where: str) -> Any:
    """PyAV; ValueError with ``where`` and what helps where it is missing."""
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"{where}: {path} is read by PyAV, which is not installed: pip install"
            " 'loongplug[video]', or give a video's frames as image files, a sound as WAV of whole"
            " numbers with 16,000 samples a second."
        ) from error
    return av


@contextmanager
def opened_stream(
    kind: Stream, path: MediaFile, *, where: str, header: bool = False
) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of this kind; what goes wrong inside says ``where``."""
    av = imported_av(path, where=where)
    options = {"format_whitelist": ",".join(_CONTAINERS[kind]), "protocol_whitelist": "file"}
    with opened_media(kind, path, where=where, header=header) as file:
        # By its descriptor, which PyAV reads quicker than through Python; never by its name, which
        # may be an address to FFmpeg, and a link to another file by now.
        # Members of archives, and files that are fetched piece by piece, have none.
        raw = getattr(file, "raw", None)
        source = f"/proc/self/fd/{file.fileno()}" if isinstance(raw, FileIO) else file
        try:
            with av.open(source, container_options=options) as container:
                streams = getattr(container.streams, kind)
                if not streams:
                    raise ValueError(f"it has no {kind} stream")
                yield container, streams[0]
        except DataSourceError:
            raise
        # Of damaged files, decoders raise any kind, MemoryError among them.
        except Exception as error:
            # FFmpeg's own words, without the descriptor.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ValueError(
                f"{where}: {kind} {path} is damaged or no {kind} of a kind that is read ({reason}):"
                f" replace the file, or convert it to {'MP4' if kind == 'video' else 'WAV'}."
            ) from error
