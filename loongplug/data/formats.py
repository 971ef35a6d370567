"""Rows in the formats that people have, to conversations.

OpenAI's messages, the turns of ShareGPT and LLaVA, the questions and answers of Alpaca and of
ms-swift, and plain text; each row says by its keys which one it is in.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from loongplug.data.conversation import Conversation, MediaPart, Message, Part
from loongplug.data.kinds import KINDS
from loongplug.data.media_files import InlineFile
from loongplug.data.remarks import MASKED
from loongplug.data.schemas import (
    AlpacaRow,
    AnyPart,
    AnyRow,
    ConversationsRow,
    MessagesRow,
    QueryRow,
    Spoken,
    TextPart,
    TextRow,
    Url,
    validate_row,
)

PLAIN_ROLE = "text"  # of the one message of a row without roles

# What stands for a medium, with the line break that is written between it and the text.
_MARKER = re.compile(f"\n?<({'|'.join(KINDS)})>\n?")
# What templates read beside the content.
_FIELDS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
_ROLES = {"human": "user", "gpt": "assistant"}
_LONGEST_PATH = 4096  # of Linux
# What files of images and sounds begin with, in base64.
_BASE64 = re.compile(
    r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|SUQz|T2dnUw|ZkxhQw)[\w+/\s]{24,}={0,2}\s*",
    re.ASCII,
)
_REMOTE = re.compile(r"(?!s3://)[a-zA-Z][a-zA-Z0-9+.-]*://|data:")


def parse_conversation(
    row: dict[str, Any], *, where: str, ignored: Collection[str] = ()
) -> Conversation:
    """Check a row against the schema of its format; ValueError with ``where`` and the cure.

    ``ignored``: keys that may be anywhere in it without a use.
    """
    checked, unused = validate_row(row, where=where, ignored=ignored)
    conversation = _conversation(checked, where=where)
    texts = (part for said in conversation.messages for part in said.parts if isinstance(part, str))
    remarks = {("mark", f"<{kind}>") for text in texts for kind in _MARKER.findall(text)}
    remarks |= {("key", key) for key in unused}
    if not _is_trained(checked, "assistant", where=where):
        remarks = {MASKED}
    return replace(conversation, remarks=tuple(sorted(remarks)))


def _conversation(checked: AnyRow, *, where: str) -> Conversation:
    messages = _messages(checked, where=where)
    if isinstance(checked, TextRow):
        if not _says_something(messages[0]):
            raise ValueError(f"{where}: the text is empty: drop the row.")
        return Conversation(messages=tuple(messages), where=where, plain=True)
    if messages[0].role == "assistant":
        raise ValueError(
            f"{where}: the first message is the assistant's: put a user message before it."
        )
    for number, message in enumerate(messages, start=1):
        calls = "tool_calls" in message.fields
        if message.role == "assistant" and not calls and not _says_something(message):
            raise ValueError(
                f"{where}: message {number}, the assistant's, is empty: write the answer, or drop"
                " the row."
            )
    messages[0] = replace(messages[0], tools=checked.tools or ())
    return Conversation(messages=tuple(messages), where=where)


def _says_something(message: Message) -> bool:
    return any(not isinstance(part, str) or part.strip() for part in message.parts)


def _is_trained(said: Spoken, role: str, *, where: str) -> bool:
    """What ``loss`` and ``weight`` of a turn or a row say; without either, it is trained on."""
    given = {said.loss, None if said.weight is None else bool(said.weight)} - {None}
    if len(given) > 1:
        raise ValueError(
            f"{where}: loss is {said.loss} and weight {said.weight}: give one of the two."
        )
    if True in given and role != "assistant":
        raise ValueError(
            f"{where}: a turn of the {role} asks to be trained on, by loss or weight, but only the"
            " assistant's are: drop the key."
        )
    return False not in given


def _parts(content: str | list[AnyPart], beside: "_Beside | None", *, where: str) -> Iterator[Part]:
    """The pieces of a message; media ``beside`` it take the places of parts without a path."""
    if isinstance(content, str):
        yield from [content] if beside is None else _fill(content, beside)
        return
    for part in content:
        if isinstance(part, TextPart):
            yield part.text
            continue
        kind, fps = part.type.removesuffix("_url"), getattr(part, "fps", None)
        if (source := getattr(part, part.type)) is not None:
            yield _medium(kind, source, fps=fps, where=where)
        elif beside is not None:
            yield beside.take(kind, fps=fps)
        else:
            raise ValueError(
                f"{where}: a part of type {kind} has no path, and the row has no {kind}s"
                f' beside its messages: write {{"type": "{kind}", "{kind}": "path"}}.'
            )


def _messages(row: AnyRow, *, where: str) -> list[Message]:
    """The messages, with media that stand beside them in the places of their markers.

    Without any, what looks like a marker may well be a web page's; but not in LLaVA's turns.
    """
    turns = list(_turns(row, where=where))
    media = {kind: row.media(kind) for kind in KINDS}
    beside = None
    if any(media.values()) or isinstance(row, ConversationsRow):
        beside = _Beside(media, fps=row.fps, where=where)
        for kind, found in media.items():
            written = sum(_places(content, kind) for _, content in turns)
            if written != len(found):
                raise ValueError(
                    f"{where}: {written} <{kind}> markers in the text for {len(found)}"
                    f" {kind}s of the row: write one <{kind}> where each belongs, in a list of"
                    f' parts {{"type": "{kind}"}}.'
                )
    return [
        replace(message, parts=tuple(_parts(content, beside, where=where)))
        for message, content in turns
    ]


def _turns(row: AnyRow, *, where: str) -> Iterator[tuple[Message, str | list[AnyPart]]]:
    """Each message of a row, still without its parts, and the content that they are of."""
    if isinstance(row, TextRow):
        yield Message(PLAIN_ROLE, ()), row.text
        return
    if row.system:
        yield Message("system", ()), row.system
    if isinstance(row, QueryRow):
        more = row.input if isinstance(row, AlpacaRow) else None
        query = "\n".join(filter(None, (row.query, more)))
        for asked, answer in (*(row.history or ()), (query, row.response)):
            yield Message("user", ()), asked
            yield Message("assistant", ()), answer
        return
    for said in row.messages if isinstance(row, MessagesRow) else row.conversations:
        role = _ROLES.get(said.role, said.role)
        fields = {key: value for key in _FIELDS if (value := getattr(said, key, None))}
        if role != "assistant" and {"reasoning_content", "tool_calls"} & fields.keys():
            raise ValueError(
                f"{where}: a turn of the {role} has reasoning_content or tool_calls, which only the"
                " assistant's have: drop the key, or mend the role."
            )
        yield Message(role, (), _is_trained(said, role, where=where), fields), said.content


def _places(content: str | list[AnyPart], kind: str) -> int:
    """Where media of the row belong: in a string, markers; among parts, those without a path."""
    if isinstance(content, str):
        return content.count(f"<{kind}>")
    return sum(part.type == kind and getattr(part, kind) is None for part in content)


class _Beside:
    """The media of a row beside its messages, to be taken in their order."""

    def __init__(self, media: dict[str, list[Any]], *, fps: float | None, where: str) -> None:
        self._left = {kind: iter(each) for kind, each in media.items()}
        self._fps = fps
        self._where = where

    def take(self, kind: str, *, fps: float | None = None) -> Part:
        """The next of its kind; ``fps`` is of this video, else the row's."""
        fps = self._fps if fps is None else fps
        return _medium(kind, next(self._left[kind]), fps=fps, where=self._where)


def _fill(text: str, beside: _Beside) -> Iterator[Part]:
    """The text's pieces, and what each marker between them stands for."""
    pieces = _MARKER.split(text)  # text, marker, text, ...
    for number, piece in enumerate(pieces):
        if number % 2:
            yield beside.take(piece)
        elif piece or len(pieces) == 1:
            yield piece


def _medium(kind: str, source: Any, *, fps: float | None, where: str) -> Part:
    """The part of a name, of a URL, of a file in the row, or of the names of a video's frames."""
    if isinstance(source, InlineFile):
        return MediaPart(kind, source)
    if not isinstance(source, list):
        text = source.url if isinstance(source, Url) else source
        if kind == "video":
            return MediaPart(kind, _local(text, where=where), fps)
        if not text.startswith("data:"):
            return MediaPart(kind, _local(text, where=where))
        try:
            return MediaPart(kind, InlineFile.of_url(text))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if fps is None:
        raise ValueError(
            f'{where}: a video given as frames has no "fps": give how many of its frames make a'
            ' second, a number above 0, as in {"type": "video", "video": ["first.png",'
            ' "second.png"], "fps": 2.0}.'
        )
    return MediaPart(kind, tuple(_local(frame, where=where) for frame in source), fps)


def _local(text: str, *, where: str) -> str:
    """The path of a file here, or the URL of one on S3; nothing else is downloaded."""
    if len(text) > _LONGEST_PATH or _BASE64.fullmatch(text):
        raise ValueError(
            f"{where}: {text[:20]}... of {len(text):,} characters is not the path of a file: if it"
            " is the file itself in base64, write data:image/png;base64, in front of it (or"
            " image/jpeg, audio/wav, as it is)."
        )
    text = text.removeprefix("file://")
    if _REMOTE.match(text):
        raise ValueError(
            f"{where}: {text[:60]} is not a file here, and nothing is downloaded but s3://: save it"
            " and give its path."
        )
    if not text:
        raise ValueError(f"{where}: the path of an image, a video or a sound is empty.")
    return text
