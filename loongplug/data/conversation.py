"""The one schema that rows have today: messages in the manner of OpenAI's chat format."""

import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_ROLES = ("system", "user", "assistant")
_SHAPE = '{"messages": [{"role": "user", "content": "..."}, ...]}'
_VIDEO_SHAPE = '{"type": "video", "video": ["first.png", "second.png", ...], "fps": 2.0}'


@dataclass(frozen=True)
class Part:
    """A piece of a message: its text, or the path of an image."""

    kind: Literal["text", "image"]
    value: str


@dataclass(frozen=True)
class VideoPart:
    """A video in a message: the paths of its frames, and how many of them make a second."""

    frames: tuple[str, ...]
    fps: float


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part | VideoPart, ...]

    @property
    def text(self) -> str:
        """The message's text without its images and videos."""
        return "".join(
            part.value for part in self.parts if isinstance(part, Part) and part.kind == "text"
        )


@dataclass(frozen=True)
class Video:
    """The image files of a video's frames, in order, and how many of them make a second."""

    frames: tuple[Path, ...]
    fps: float


Medium = Path | Video  # an image is the path of its file


@dataclass(frozen=True)
class Conversation:
    """A row: its messages and where it stands (``path:line``)."""

    messages: tuple[Message, ...]
    where: str

    def media(self, folder: Path) -> tuple[Medium, ...]:
        """Images and videos in the order of their tokens; relative paths start at ``folder``."""
        found: list[Medium] = []
        for message in self.messages:
            for part in message.parts:
                if isinstance(part, VideoPart):
                    found.append(Video(tuple(folder / frame for frame in part.frames), part.fps))
                elif part.kind == "image":
                    found.append(folder / part.value)
        return tuple(found)


def parse_conversation(row: dict[str, Any], *, where: str) -> Conversation:
    """Check a row against the schema; ValueError with ``where`` and the cure otherwise.

    Keys other than ``messages`` are allowed and left alone: people keep ids and tags there.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: unknown schema with keys {sorted(row)}: expected a non-empty list under"
            f' "messages", as in {_SHAPE}.'
        )
    parsed = tuple(
        _parse_message(message, where=f"{where}: message {number}")
        for number, message in enumerate(messages, start=1)
    )
    if parsed[0].role == "assistant":
        raise ValueError(
            f"{where}: the first message is the assistant's: put a user message before it."
        )
    return Conversation(messages=parsed, where=where)


def _parse_message(message: Any, *, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        given = message.get("role") if isinstance(message, dict) else message
        raise ValueError(
            f"{where}: role {given!r} is unknown: expected one of {', '.join(_ROLES)}, as in"
            f" {_SHAPE}."
        )
    content = message.get("content")
    if isinstance(content, str):
        return Message(role=message["role"], parts=(Part("text", content),))
    if not isinstance(content, list) or not content:
        raise ValueError(
            f'{where}: "content" is {type(content).__name__}: expected a string or a non-empty'
            " list of parts."
        )
    return Message(
        role=message["role"],
        parts=tuple(_parse_part(part, where=where) for part in content),
    )


def _parse_part(part: Any, *, where: str) -> Part | VideoPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video":
        return _parse_video(part, where=where)
    if kind not in ("text", "image"):
        raise ValueError(
            f'{where}: a part of type {kind!r} is unknown: expected {{"type": "text", "text":'
            f' "..."}}, {{"type": "image", "image": "path"}} or {_VIDEO_SHAPE}.'
        )
    value = part.get(kind)
    if not isinstance(value, str):
        raise ValueError(
            f'{where}: a part of type "{kind}" has {value!r} under "{kind}": expected a string.'
        )
    return Part(kind, value)


def _parse_video(part: dict[str, Any], *, where: str) -> VideoPart:
    frames, fps = part.get("video"), part.get("fps")
    if isinstance(frames, str):
        raise ValueError(
            f"{where}: video {frames!r} is one file, and video files cannot be read yet: give its"
            f" frames as image files, as in {_VIDEO_SHAPE}."
        )
    if (
        not isinstance(frames, list)
        or not frames
        or not all(isinstance(frame, str) for frame in frames)
    ):
        raise ValueError(
            f'{where}: a part of type "video" has {reprlib.repr(frames)} under "video": expected'
            f" the paths of at least one frame, as in {_VIDEO_SHAPE}."
        )
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(
            f'{where}: a part of type "video" has {fps!r} under "fps": expected how many of its'
            f" frames make a second, a number above 0, as in {_VIDEO_SHAPE}."
        )
    return VideoPart(tuple(frames), float(fps))
