"""What a row says, whatever format it was written in: messages of text, images, videos, sounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loongplug.data.media_files import InlineFile, MediaFile, MediaRoot, media_named
from loongplug.data.remarks import Remark


@dataclass(frozen=True)
class MediaPart[File]:
    """A medium in a message: its kind, and its file, or the files of a video's frames.

    ``fps``: of frames, how many of them make a second; of a video's file, how many of them to take
    per second, None for what the run or the model's folder says.
    """

    kind: str  # image, video or audio, as templates and encoders' entries have it
    source: File | tuple[File, ...]
    fps: float | None = None


# A piece of a message; a string is its text. Files are named, or stand in the row.
Part = str | MediaPart[str | InlineFile]
Named = MediaPart[MediaFile]


@dataclass(frozen=True)
class Message:
    """What one side says. ``trained``: an assistant's answer counts in the loss."""

    role: str
    parts: tuple[Part, ...]
    trained: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)  # that templates read beside the parts
    tools: Sequence[dict[str, Any]] = ()  # that the row offers, at its first message

    @property
    def text(self) -> str:
        """The message's text without its media."""
        return "".join(part for part in self.parts if isinstance(part, str))


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Messages, or a value as JSON has it, with each text in it changed, an object's keys, too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_texts(each, change) for each in value])
    if isinstance(value, Message):
        kept = {key: getattr(value, key) for key in ("tools", "fields", "parts")}
        return replace(value, **{key: map_texts(each, change) for key, each in kept.items()})
    return value


@dataclass(frozen=True)
class Video:
    """The image files of a video's frames, in order, and how many of them make a second."""

    frames: tuple[MediaFile, ...]
    fps: float

    @property
    def times(self) -> tuple[float, ...]:
        """When each frame is shown, in seconds."""
        return tuple(frame / self.fps for frame in range(len(self.frames)))


@dataclass(frozen=True)
class VideoHeader:
    """What a file says of its first video stream; sides are those of the upright frames."""

    frames: int
    fps: float
    height: int
    width: int


@dataclass(frozen=True)
class VideoClip:
    """The frames that are taken of a video file, chosen from its header."""

    path: MediaFile
    indices: tuple[int, ...]  # of the frames taken, ascending
    header: VideoHeader

    @property
    def fps(self) -> float:
        """How many of the taken frames make a second, as transformers computes it."""
        return len(self.indices) / self.header.frames * self.header.fps

    @property
    def times(self) -> tuple[float, ...]:
        """When each taken frame is shown, in seconds."""
        return tuple(index / self.header.fps for index in self.indices)


@dataclass(frozen=True)
class AudioClip:
    """A sound's file and its length, in samples of one channel, 16,000 of them a second."""

    path: MediaFile
    samples: int


AnyVideo = Video | VideoClip
Medium = MediaFile | AnyVideo | AudioClip  # its header has been read, an image's later


@dataclass(frozen=True)
class Conversation:
    """A row: its messages and where it stands (``path:line``).

    ``plain`` rows are text without roles, in one message; no chat template is applied to them.
    """

    messages: tuple[Message, ...]
    where: str
    plain: bool = False
    remarks: tuple[Remark, ...] = ()

    def media(self, root: MediaRoot) -> tuple[Named, ...]:
        """All media in the order of their tokens; their names start at ``root``."""

        def named(file: str | InlineFile) -> MediaFile:
            return media_named(file, root) if isinstance(file, str) else file

        found: list[Named] = []
        for part in (part for message in self.messages for part in message.parts):
            if not isinstance(part, str):
                source = part.source
                files = tuple(map(named, source)) if isinstance(source, tuple) else named(source)
                found.append(MediaPart(part.kind, files, part.fps))
        return tuple(found)
