"""Rows in the formats that people have, to conversations.

OpenAI's messages, the turns of ShareGPT and LLaVA, and plain text; each row says by its keys
which one it is in.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from loongplug.data.conversation import Conversation, Message, Part, VideoPart
from loongplug.data.schemas import (
    AnyPart,
    AnyRow,
    ConversationsRow,
    ImagePart,
    ImageUrlPart,
    MessagesRow,
    TextPart,
    TextRow,
    Url,
    VideoPartRow,
    validate_row,
)

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"
PLAIN_ROLE = "text"  # of the one message of a row without roles

# With the line break that is written between a marker and the text.
_MARKER = re.compile(f"\n?({IMAGE_MARKER}|{VIDEO_MARKER})\n?")
_ROLES = {"human": "user", "gpt": "assistant"}
_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")


def parse_conversation(row: dict[str, Any], *, where: str) -> Conversation:
    """Check a row against the schema of its format; ValueError with ``where`` and the cure.

    Keys beside those of the schema are allowed and left alone: people keep ids and tags there.
    """
    checked = validate_row(row, where=where)
    if isinstance(checked, TextRow):
        messages = _with_media([(PLAIN_ROLE, checked.text)], checked, where=where)
        if not _says_something(messages[0]):
            raise ValueError(f"{where}: the text is empty: drop the row.")
        return Conversation(messages=messages, where=where, plain=True)
    if isinstance(checked, MessagesRow):
        messages = _openai(checked, where=where)
    else:
        messages = _turns(checked, where=where)
    if messages[0].role == "assistant":
        raise ValueError(
            f"{where}: the first message is the assistant's: put a user message before it."
        )
    for number, message in enumerate(messages, start=1):
        if message.role == "assistant" and not _says_something(message):
            raise ValueError(
                f"{where}: message {number}, the assistant's, is empty: write the answer, or drop"
                " the row."
            )
    return Conversation(messages=messages, where=where)


def _says_something(message: Message) -> bool:
    """Whether there is more than blanks."""
    return bool(message.text.strip()) or any(
        isinstance(part, VideoPart) or part.kind != "text" for part in message.parts
    )


def _openai(row: MessagesRow, *, where: str) -> tuple[Message, ...]:
    if not _has_media(row):
        return tuple(
            Message(message.role, tuple(_parts(message.content, where=where)))
            for message in row.messages
        )
    texts = []
    for number, message in enumerate(row.messages, start=1):
        if not isinstance(message.content, str):
            raise ValueError(
                f"{where}: message {number} has a list of parts, but the row has images or videos"
                f" beside its messages: put them among the parts, or write {IMAGE_MARKER} in a"
                " string where each belongs."
            )
        texts.append((message.role, message.content))
    return _with_media(texts, row, where=where)


def _parts(content: str | list[Any], *, where: str) -> Iterator[Part | VideoPart]:
    if isinstance(content, str):
        yield Part("text", content)
        return
    for part in content:
        yield _part(part, where=where)


def _part(part: AnyPart, *, where: str) -> Part | VideoPart:
    if isinstance(part, TextPart):
        return Part("text", part.text)
    if isinstance(part, ImagePart):
        return Part("image", _local(part.image, where=where))
    if isinstance(part, ImageUrlPart):
        return Part("image", _local(part.image_url, where=where))
    source = part.video if isinstance(part, VideoPartRow) else part.video_url
    return _video(source, fps=part.fps, where=where)


def _turns(row: ConversationsRow, *, where: str) -> tuple[Message, ...]:
    texts = [(_ROLES.get(turn.speaker, turn.speaker), turn.value) for turn in row.conversations]
    if row.system:
        texts.insert(0, ("system", row.system))
    return _with_media(texts, row, where=where)


def _has_media(row: AnyRow) -> bool:
    return bool(row.all_images or row.all_videos)


def _with_media(
    texts: Sequence[tuple[str, str]], row: AnyRow, *, where: str
) -> tuple[Message, ...]:
    """The messages (role, text) with the row's media in the places of their markers.

    Plain text without media keeps what looks like a marker: it may well be a web page's.
    """
    if isinstance(row, TextRow) and not _has_media(row):
        return tuple(Message(role, (Part("text", text),)) for role, text in texts)
    images, videos = row.all_images, row.all_videos
    for marker, media, kind in (
        (IMAGE_MARKER, images, "images"),
        (VIDEO_MARKER, videos, "videos"),
    ):
        if (written := sum(text.count(marker) for _, text in texts)) != len(media):
            raise ValueError(
                f"{where}: {written} {marker} markers in the text for {len(media)} {kind} of the"
                f" row: write one {marker} where each belongs."
            )
    waiting: dict[str, Iterator[Part | VideoPart]] = {
        IMAGE_MARKER: iter([Part("image", _local(path, where=where)) for path in images]),
        VIDEO_MARKER: iter([_video(source, fps=row.fps, where=where) for source in videos]),
    }
    return tuple(Message(role, tuple(_fill(text, waiting))) for role, text in texts)


def _fill(text: str, waiting: dict[str, Iterator[Part | VideoPart]]) -> Iterator[Part | VideoPart]:
    """The text's pieces, and what waits for each marker between them."""
    pieces = _MARKER.split(text)  # text, marker, text, ...
    for number, piece in enumerate(pieces):
        if number % 2:
            yield next(waiting[piece])
        elif piece or len(pieces) == 1:
            yield Part("text", piece)


def _video(source: Any, *, fps: float | None, where: str) -> VideoPart:
    if not isinstance(source, list):
        return VideoPart(_local(source, where=where), fps)
    if fps is None:
        raise ValueError(
            f'{where}: a video given as frames has no "fps": give how many of its frames make a'
            ' second, a number above 0, as in {"type": "video", "video": ["first.png",'
            ' "second.png"], "fps": 2.0}.'
        )
    return VideoPart(tuple(_local(frame, where=where) for frame in source), fps)


def _local(path: str | Url, *, where: str) -> str:
    """The path of a file here; nothing is downloaded in training."""
    text = path.url if isinstance(path, Url) else path
    text = text.removeprefix("file://")
    if _REMOTE.match(text):
        raise ValueError(
            f"{where}: {text[:60]} is no file here, and nothing is downloaded: save it and give"
            " its path."
        )
    if not text:
        raise ValueError(f"{where}: the path of an image or a video is empty.")
    return text
