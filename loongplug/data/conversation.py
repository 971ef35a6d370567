"""The one schema that rows have today: messages in the manner of OpenAI's chat format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_ROLES = ("system", "user", "assistant")
_SHAPE = '{"messages": [{"role": "user", "content": "..."}, ...]}'


@dataclass(frozen=True)
class Part:
    """A piece of a message: its text, or the path of an image."""

    kind: Literal["text", "image"]
    value: str


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The message's text without its images."""
        return "".join(part.value for part in self.parts if part.kind == "text")


@dataclass(frozen=True)
class Conversation:
    """A row: its messages and where it stands (``path:line``)."""

    messages: tuple[Message, ...]
    where: str

    def image_paths(self, folder: Path) -> tuple[Path, ...]:
        """The images in the order of their tokens; relative paths start at ``folder``."""
        return tuple(
            folder / part.value
            for message in self.messages
            for part in message.parts
            if part.kind == "image"
        )


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


def _parse_part(part: Any, *, where: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video":
        raise ValueError(f"{where}: videos cannot be loaded yet: give the frames as images.")
    if kind not in ("text", "image"):
        raise ValueError(
            f'{where}: a part of type {kind!r} is unknown: expected {{"type": "text", "text":'
            ' "..."} or {"type": "image", "image": "path"}.'
        )
    value = part.get(kind)
    if not isinstance(value, str):
        raise ValueError(
            f'{where}: a part of type "{kind}" has {value!r} under "{kind}": expected a string.'
        )
    return Part(kind, value)
