"""Conversations: what rows say, in formats of OpenAI, ShareGPT, LLaVA, Alpaca, ms-swift or text."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from loongplug.data.media_files import InlineFile, MediaFile, MediaRoot, media_named
from loongplug.data.sample import MASKED, MEDIA_KINDS, Remark, told
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
    validate_row,
)

PLAIN_ROLE = "text"  # of the one message of a row without roles

# What stands for a medium, with the line break that is written between it and the text.
_MARKER = re.compile(f"\n?<({'|'.join(MEDIA_KINDS)})>\n?")

# What templates read beside the content.
_FIELDS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
_ROLES = {"human": "user", "gpt": "assistant"}
_REMOTE = re.compile(r"(?!s3://)[a-zA-Z][a-zA-Z0-9+.-]*://|data:")


@dataclass(frozen=True)
class MediaPart[File]:
    """A medium in a message: its file, or the files of a video's frames."""

    kind: str  # image, video or audio, as templates and encoders' entries have it
    source: File | tuple[File, ...]
    fps: float | None = None  # of frames, or how many to take of a video; None: as others say


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
        return "".join(part for part in self.parts if isinstance(part, str))

    def with_texts(self, change: Callable[[str], Any]) -> "Message":
        """The message with each text of its parts, fields and tools changed, keys, too."""
        names = ("tools", "fields", "parts")
        return replace(self, **{name: _mapped(getattr(self, name), change) for name in names})


def joined_texts(messages: Iterable[Message]) -> str:
    texts: list[str] = []
    for message in messages:
        message.with_texts(texts.append)
    return "".join(texts)


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    return value


@dataclass(frozen=True)
class Video:
    """The image files of a video's frames, in order, and how many of them make a second."""

    frames: tuple[MediaFile, ...]
    fps: float

    @property
    def times(self) -> tuple[float, ...]:
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
    """A row: its messages and where it stands; no chat template is applied to ``plain`` text."""

    messages: tuple[Message, ...]
    where: str
    plain: bool = False
    remarks: tuple[Remark, ...] = ()

    def media(self, root: MediaRoot) -> tuple[Named, ...]:
        """All media in the order of their tokens; their names start at ``root``."""
        named = partial(media_named, root=root)
        found: list[Named] = []
        for part in (part for message in self.messages for part in message.parts):
            if not isinstance(part, str):
                source = part.source
                files = tuple(map(named, source)) if isinstance(source, tuple) else named(source)
                found.append(MediaPart(part.kind, files, part.fps))
        return tuple(found)


def parse_conversation(
    row: dict[str, Any], *, where: str, ignored: Collection[str] = ()
) -> Conversation:
    """Check a row against the schema of its format; ValueError with ``where`` and the cure."""
    with told(f"{where}: "):
        checked, unused = validate_row(row, ignored=ignored)
        messages = _messages(checked)
        _require_words(messages, plain=isinstance(checked, TextRow))
        masked = not _is_trained(checked, "assistant")
    if not isinstance(checked, TextRow):
        messages[0] = replace(messages[0], tools=checked.tools or ())
    texts = (part for said in messages for part in said.parts if isinstance(part, str))
    remarks = {("mark", f"<{kind}>") for text in texts for kind in _MARKER.findall(text)}
    remarks |= {("key", key) for key in unused}
    return Conversation(
        messages=tuple(messages),
        where=where,
        plain=isinstance(checked, TextRow),
        remarks=(MASKED,) if masked else tuple(sorted(remarks)),
    )


def _require_words(messages: Sequence[Message], *, plain: bool) -> None:
    """ValueError where nobody asks, or where there is no answer, or no plain text."""
    if messages[0].role == "assistant":
        raise ValueError("the first message is the assistant's: put a user message before it.")
    for number, message in enumerate(messages, start=1):
        says = any(not isinstance(part, str) or part.strip() for part in message.parts)
        if plain and not says:
            raise ValueError("the text is empty: drop the row.")
        if message.role == "assistant" and not says and "tool_calls" not in message.fields:
            raise ValueError(
                f"message {number}, the assistant's, is empty: write the answer, or drop the row."
            )


def _is_trained(said: Spoken, role: str) -> bool:
    """What ``loss`` and ``weight`` of a turn or a row say; without either, it is trained on."""
    given = {said.loss, None if said.weight is None else bool(said.weight)} - {None}
    if len(given) > 1:
        raise ValueError(f"loss is {said.loss} and weight {said.weight}: give one of the two.")
    if True in given and role != "assistant":
        raise ValueError(
            f"a turn of the {role} asks to be trained on, by loss or weight, but only the"
            " assistant's are: drop the key."
        )
    return False not in given


def _messages(row: AnyRow) -> list[Message]:
    """The messages, with media that stand beside them in the places of their markers."""
    turns = list(_turns(row))
    media = {kind: row.media(kind) for kind in MEDIA_KINDS}
    left = {kind: iter(each) for kind, each in media.items()}
    beside = any(media.values()) or isinstance(row, ConversationsRow)

    def take(kind: str, fps: float | None = None) -> Part:
        """The next of this kind; ``fps`` is of this video, else the row's."""
        return _medium(kind, next(left[kind]), fps=row.fps if fps is None else fps)

    for kind, each in media.items() if beside else ():
        written = sum(_places(content, kind) for _, content in turns)
        if written != len(each):
            raise ValueError(
                f"{written} <{kind}> markers in the text for {len(each)} {kind}s of the"
                f" row: write one <{kind}> where each belongs, in a list of parts"
                f' {{"type": "{kind}"}}.'
            )
    return [
        replace(message, parts=tuple(_parts(content, take if beside else None)))
        for message, content in turns
    ]


def _places(content: str | list[AnyPart], kind: str) -> int:
    """Where media of the row belong: in a string, markers; among parts, those without a path."""
    if isinstance(content, str):
        return content.count(f"<{kind}>")
    media = [part for part in content if not isinstance(part, TextPart)]
    return sum(part.kind == kind and part.source is None for part in media)


def _parts(content: str | list[AnyPart], take: Callable[..., Part] | None) -> Iterator[Part]:
    """The pieces of a message; media of the row, by ``take``, are where they stand for them."""
    if isinstance(content, str):
        pieces = [content] if take is None else _MARKER.split(content)  # text, kind, text, ...
        for number, piece in enumerate(pieces):
            if number % 2 and take is not None:
                yield take(piece)
            elif piece or len(pieces) == 1:
                yield piece
        return
    for part in content:
        if isinstance(part, TextPart):
            yield part.text
            continue
        kind, source, fps = part.kind, part.source, getattr(part, "fps", None)
        if source is not None:
            yield _medium(kind, source, fps=fps)
        elif take is not None:
            yield take(kind, fps)
        else:
            raise ValueError(
                f"a part of type {kind} has no path, and the row has no {kind}s beside its"
                f' messages: write {{"type": "{kind}", "{kind}": "path"}}.'
            )


def _turns(row: AnyRow) -> Iterator[tuple[Message, str | list[AnyPart]]]:
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
                f"a turn of the {role} has reasoning_content or tool_calls, which only the"
                " assistant's have: drop the key, or mend the role."
            )
        yield Message(role, (), _is_trained(said, role), fields), said.content


def _medium(kind: str, source: Any, *, fps: float | None) -> Part:
    """What a row says of an image, a video or a sound: names of files, or the file itself."""
    if kind == "video":
        if not isinstance(source, list):
            return MediaPart(kind, _local(source), fps)
        if fps is None:
            raise ValueError(
                'a video given as frames has no "fps": give how many of its frames make a'
                ' second, a number above 0, as in {"type": "video", "video": ["first.png",'
                ' "second.png"], "fps": 2.0}.'
            )
        return MediaPart(kind, tuple(_local(frame) for frame in source), fps)
    if isinstance(source, str):
        source = InlineFile.of_url(source) if source.startswith("data:") else _local(source)
    return MediaPart(kind, source)


def _local(text: str) -> str:
    """The path of a file here, or the URL of one on S3; nothing else is downloaded."""
    text = text.removeprefix("file://")
    if _REMOTE.match(text):
        raise ValueError(
            f"{text[:60]} is not a file here, and nothing is downloaded but s3://: save it"
            " and give its path."
        )
    if not text:
        raise ValueError("the path of an image, a video or a sound is empty.")
    return text
