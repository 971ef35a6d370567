"""The shapes that rows of JSONL files may have, checked by pydantic."""

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from loongplug.data.media_files import InlineFile

_MOST_ERRORS = 3  # of one row in one message

LEAST_FPS = 1e-3  # of a video: slower ones have times beyond what positions can count


def _encodable(text: str) -> str:
    """The text; JSON's escapes can write half of a character, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "no_text", "It is not text: half of a character (a lone surrogate) stands in it"
        ) from error
    return text


def _file_name(name: str) -> str:
    if "\0" in name:
        raise PydanticCustomError("no_file_name", "No file's name can have a NUL character")
    return name


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, AfterValidator(_file_name)]
Rate = Annotated[float, Field(ge=LEAST_FPS, allow_inf_nan=False)]
Frames = Annotated[list[Name], Field(min_length=1)]


def _string_or(other: str) -> Discriminator:
    """Chooses by whether there is a string, so that an error speaks of one shape only."""
    return Discriminator(lambda value: "string" if isinstance(value, str) else other)


# The name of an image or a sound, or itself where rows can hold bytes.
File = Annotated[
    Annotated[Name, Tag("string")] | Annotated[InlineFile, Tag("bytes")],
    Discriminator(lambda value: "bytes" if isinstance(value, InlineFile) else "string"),
]


class _Schema(BaseModel):
    """Keys beside those of the schema are left alone: people keep ids and tags there."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Schema):
    type: Literal["text"]
    text: Text


class ImagePartRow(_Schema):
    """Without ``image`` it stands for the next of the row's ``images``."""

    type: Literal["image"]
    image: File | None = None


class Url(_Schema):
    url: Name


UrlOrString = Annotated[
    Annotated[Name, Tag("string")] | Annotated[Url, Tag("object")], _string_or("object")
]
Source = Annotated[
    Annotated[Name, Tag("string")] | Annotated[Frames, Tag("frames")], _string_or("frames")
]
Files = Annotated[
    Annotated[File, Tag("one")] | Annotated[list[File], Tag("list")],
    Discriminator(lambda value: "one" if isinstance(value, str | InlineFile) else "list"),
]


class ImageUrlPart(_Schema):
    type: Literal["image_url"]
    image_url: UrlOrString


class VideoPartRow(_Schema):
    """Without ``video`` it stands for the next of the row's ``videos``."""

    type: Literal["video"]
    video: Source | None = None
    fps: Rate | None = None


class VideoUrlPart(_Schema):
    type: Literal["video_url"]
    video_url: UrlOrString
    fps: Rate | None = None


class AudioPartRow(_Schema):
    """Without ``audio`` it stands for the next of the row's ``audios``."""

    type: Literal["audio"]
    audio: File | None = None


class AudioUrlPart(_Schema):
    type: Literal["audio_url"]
    audio_url: UrlOrString


AnyPart = Annotated[
    TextPart
    | ImagePartRow
    | ImageUrlPart
    | VideoPartRow
    | VideoUrlPart
    | AudioPartRow
    | AudioUrlPart,
    Field(discriminator="type"),
]
Parts = Annotated[list[AnyPart], Field(min_length=1)]


class _Spoken(_Schema):
    """Of an answer, ``loss`` (ms-swift) or ``weight`` (OpenAI) say whether it is trained on."""

    loss: bool | None = None
    weight: Literal[0, 1] | None = None


class MessageRow(_Spoken):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[Parts, Tag("parts")], _string_or("parts")
    ]


class ChatTurn(_Spoken):
    speaker: Literal["system", "human", "user", "gpt", "assistant"] = Field(alias="from")
    value: Text


class _WithMedia(_Schema):
    """Media beside the text, which has a marker for each; ``fps`` is that of all videos."""

    images: list[File] | None = None
    videos: list[Source] | None = None
    audios: list[File] | None = None
    fps: Rate | None = None

    @property
    def all_images(self) -> list[str | InlineFile]:
        """In the order of their markers, as are videos and sounds."""
        return list(self.images or ())

    @property
    def all_videos(self) -> list[str | list[str]]:
        return list(self.videos or ())

    @property
    def all_audios(self) -> list[str | InlineFile]:
        return list(self.audios or ())


class _WithMedium(_WithMedia):
    """One image, video or sound under a key of its own, as LLaVA has it."""

    image: Files | None = None
    video: Name | None = None
    audio: Files | None = None

    @property
    def all_images(self) -> list[str | InlineFile]:
        return _as_list(self.image) + super().all_images

    @property
    def all_audios(self) -> list[str | InlineFile]:
        return _as_list(self.audio) + super().all_audios

    @property
    def all_videos(self) -> list[str | list[str]]:
        return [*([self.video] if self.video else []), *super().all_videos]


def _as_list(files: str | InlineFile | list[str | InlineFile] | None) -> list[str | InlineFile]:
    return files if isinstance(files, list) else [files] if files else []


class MessagesRow(_WithMedia):
    messages: Annotated[list[MessageRow], Field(min_length=1)]
    system: Text | None = None

    @property
    def turns(self) -> list[MessageRow]:
        """The messages, behind what stands beside them for the system to say."""
        first = [MessageRow(role="system", content=self.system)] if self.system else []
        return [*first, *self.messages]


class ConversationsRow(_WithMedium):
    conversations: Annotated[list[ChatTurn], Field(min_length=1)]
    system: Text | None = None


class TextRow(_WithMedium):
    text: Text


AnyRow = MessagesRow | ConversationsRow | TextRow

# Keys that other programs use. Without them, training would differ from what the row means.
_PREFERENCE = "another answer to compare with, and LoongPlug trains on one answer to a question"
_TOOLS = "tools, which LoongPlug does not put into the text"
_REFUSED = {
    **dict.fromkeys(
        ("rejected_response", "rejected_messages", "rejected", "chosen", "rejected_images"),
        _PREFERENCE,
    ),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), _TOOLS),
    "objects": "boxes or points of objects, which LoongPlug does not write into the text",
}
_BESIDE_MESSAGES = {**_REFUSED, "audio": "a sound, which stands under 'audios' beside messages"}
_IN_TURNS = {
    **_REFUSED,
    **dict.fromkeys(("audio", "audios"), "sound, which stands among a turn's parts or beside all"),
}
_OTHER_PATHS = ("url", "path", "image_url", "video_url", "audio_url", "base64")
_TOOL_ROLES = ("tool", "tool_call", "tool_response", "function", "function_call", "observation")

_BY_KEY: tuple[tuple[str, type[AnyRow], str], ...] = (
    ("messages", MessagesRow, '{"messages": [{"role": "user", "content": "..."}, ...]}'),
    (
        "conversations",
        ConversationsRow,
        '{"image": "path", "conversations": [{"from": "human", "value": "<image>\\n..."},'
        ' {"from": "gpt", "value": "..."}]}',
    ),
    ("text", TextRow, '{"text": "..."}'),
)


def validate_row(row: dict[str, Any], *, where: str) -> AnyRow:
    """The row in the format whose key it has: messages, conversations or text.

    Raises ValueError with ``where``, the place in the row, what is there and what was expected.
    """
    _refuse_other_meanings(row, where=where)
    # Tables that hold several formats write null for those that a row is not in.
    keys = [key for key, _, _ in _BY_KEY if row.get(key) is not None]
    if len(keys) > 1:
        raise ValueError(
            f"{where}: the row has the keys of {len(keys)} formats, {' and '.join(keys)}: keep the"
            " one that is meant, and drop or rename the others."
        )
    for key, schema, example in _BY_KEY:
        if key not in (keys or row):
            continue
        try:
            return schema.model_validate(row)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            found = "; ".join(_describe(detail, row) for detail in details[:_MOST_ERRORS])
            more = f"; and {len(details) - _MOST_ERRORS} more" * (len(details) > _MOST_ERRORS)
            raise ValueError(f"{where}: {found}{more}. A row looks like {example}.") from error
    known = " or ".join(f'"{key}" as in {example}' for key, _, example in _BY_KEY)
    raise ValueError(f"{where}: unknown schema with keys {sorted(row)}: expected {known}.")


def _refuse_other_meanings(row: dict[str, Any], *, where: str) -> None:
    """ValueError for what a row means elsewhere and cannot mean here."""
    said = [turn for key in ("messages", "conversations") for turn in _dicts(row.get(key))]
    for number, place in enumerate([row, *said]):
        of_turn = f" of message {number}" if number else ""
        refused = _IN_TURNS if number else _BESIDE_MESSAGES if place.get("messages") else _REFUSED
        # Nearly all have none of them, which one look tells.
        for key in () if refused.keys().isdisjoint(place) else refused:
            if not _is_empty(place.get(key)):
                raise ValueError(
                    f"{where}: the key {key!r}{of_turn} has {refused[key]}: write what is meant"
                    " into the messages and drop the key, or drop the row."
                )
        for key in ("role", "from") if number else ():
            if place.get(key) in _TOOL_ROLES:
                raise ValueError(
                    f"{where}: the {key} {place[key]!r}{of_turn} is of tools, which LoongPlug does"
                    " not train on: write the turn as the user's or the assistant's text, or drop"
                    " the row."
                )

        for part in _dicts(place.get("content")) if number else ():
            kind = part.get("type")
            if kind not in ("image", "video", "audio") or part.get(kind) is not None:
                continue
            if others := [key for key in _OTHER_PATHS if part.get(key) is not None]:
                raise ValueError(
                    f"{where}: a part of type {kind}{of_turn} has its path under {others[0]!r}:"
                    f" write it under {kind!r}."
                )


def _is_empty(value: Any) -> bool:
    """Whether a key says nothing: tables have each key in each row, some of them as JSON."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return not value or value in ("[]", "{}")


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _describe(detail: Any, row: dict[str, Any]) -> str:
    location = detail["loc"]
    if detail["type"] == "missing":
        _, path, _ = _place(location[:-1], row)
        return f"{path}.{location[-1]} is missing".removeprefix(".")
    _, path, value = _place(location, row)
    reason = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{path.removeprefix('.')} is {reprlib.repr(value)}, but {reason}"


def _place(location: Sequence[int | str], value: Any) -> tuple[int, str, Any]:
    """Steps left out, the path in the row as in Python, and what is there.

    Pydantic's location has the tags of unions among its steps. They are no part of the path, but
    may read like a key; the reading that leaves out least is right, of two the one that takes the
    earlier step for a tag.
    """
    if not location:
        return 0, "", value
    step, rest = location[0], location[1:]
    skipped, path, found = _place(rest, value)
    best = skipped + 1, path, found
    known = isinstance(value, dict) and step in value
    if known or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
        skipped, path, found = _place(rest, value[step])
        shown = f"[{step}]" if isinstance(step, int) else f".{step}"
        if skipped < best[0]:
            best = skipped, f"{shown}{path}", found
    return best
