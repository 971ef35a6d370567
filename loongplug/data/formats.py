"""Rows in the formats that people have, to conversations.

OpenAI's messages, the turns of ShareGPT and LLaVA, and plain text; each row says by its keys
which one it is in.
"""

import re
from collections.abc import Iterator
from typing import Any

from loongplug.data.conversation import Conversation, ImagePart, Message, Part, VideoPart
from loongplug.data.schemas import (
    AnyPart,
    AnyRow,
    ImagePartRow,
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
    media_beside = bool(checked.all_images or checked.all_videos)
    if isinstance(checked, MessagesRow) and not media_beside:
        messages = tuple(
            Message(each.role, tuple(_parts(each.content, where=where)))
            for each in checked.messages
        )
    elif isinstance(checked, TextRow) and not media_beside:
        # What looks like a marker may well be a web page's.
        messages = (Message(PLAIN_ROLE, (checked.text,)),)
    else:
        messages = _with_media(checked, where=where)
    if isinstance(checked, TextRow):
        if not _says_something(messages[0]):
            raise ValueError(f"{where}: the text is empty: drop the row.")
        return Conversation(messages=messages, where=where, plain=True)
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
    return any(not isinstance(part, str) or part.strip() for part in message.parts)


def _parts(content: str | list[AnyPart], *, where: str) -> Iterator[Part]:
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, str):
            yield part
        elif isinstance(part, TextPart):
            yield part.text
        elif isinstance(part, ImagePartRow):
            yield ImagePart(_local(part.image, where=where))
        elif isinstance(part, ImageUrlPart):
            yield ImagePart(_local(part.image_url, where=where))
        else:
            source = part.video if isinstance(part, VideoPartRow) else part.video_url
            yield _video(source, fps=part.fps, where=where)


def _with_media(row: AnyRow, *, where: str) -> tuple[Message, ...]:
    """The messages with the row's media in the places of their markers."""
    texts = list(_texts(row, where=where))
    images, videos = row.all_images, row.all_videos
    for marker, media, kind in ((IMAGE_MARKER, images, "images"), (VIDEO_MARKER, videos, "videos")):
        if (written := sum(text.count(marker) for _, text in texts)) != len(media):
            raise ValueError(
                f"{where}: {written} {marker} markers in the text for {len(media)} {kind} of the"
                f" row: write one {marker} where each belongs."
            )
    waiting: dict[str, Iterator[Part]] = {
        IMAGE_MARKER: iter([ImagePart(_local(path, where=where)) for path in images]),
        VIDEO_MARKER: iter([_video(source, fps=row.fps, where=where) for source in videos]),
    }
    return tuple(Message(role, tuple(_fill(text, waiting))) for role, text in texts)


def _texts(row: AnyRow, *, where: str) -> Iterator[tuple[str, str]]:
    """Role and text of each message of a row that has media, or may have, beside its text."""
    if isinstance(row, TextRow):
        yield PLAIN_ROLE, row.text
    elif isinstance(row, MessagesRow):
        for number, message in enumerate(row.messages, start=1):
            if not isinstance(message.content, str):
                raise ValueError(
                    f"{where}: message {number} has a list of parts, but the row has images or"
                    " videos beside its messages: put them among the parts, or write"
                    f" {IMAGE_MARKER} in a string where each belongs."
                )
            yield message.role, message.content
    else:
        if row.system:
            yield "system", row.system
        for turn in row.conversations:
            yield _ROLES.get(turn.speaker, turn.speaker), turn.value


def _fill(text: str, waiting: dict[str, Iterator[Part]]) -> Iterator[Part]:
    """The text's pieces, and what waits for each marker between them."""
    pieces = _MARKER.split(text)  # text, marker, text, ...
    for number, piece in enumerate(pieces):
        if number % 2:
            yield next(waiting[piece])
        elif piece or len(pieces) == 1:
            yield piece


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
