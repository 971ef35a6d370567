"""The shapes that rows of JSONL files may have, checked by pydantic."""

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from loongplug.data.media_files import InlineFile
from loongplug.data.row_files import parse_row_json
from loongplug.data.schema_errors import MEANINGS, described

_JSON: TypeAdapter[Any] = TypeAdapter(JsonValue)
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


def _parsed(value: Any) -> Any:
    """What JSON text says, else the value, if JSON can say it."""
    try:
        value = _JSON.validate_python(
            parse_row_json(value.encode()) if isinstance(value, str) else value
        )
        json.dumps(value, ensure_ascii=False).encode()  # an error for half of a character
        return value
    except ValueError as error:
        raise PydanticCustomError(
            "no_json", "It is not what JSON can say, in whole words"
        ) from error


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with arguments that are an object, as serving engines give it to templates."""
    function = call.get("function", call)
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = _parsed(function.get("arguments") or {})
        if isinstance(arguments, dict):
            function = function | {"arguments": arguments}
            return call | {"function": function} if "function" in call else function
    raise PydanticCustomError("no_call", 'A call is {"function": {"name": "...", "arguments": {}}}')


Text = Annotated[str, AfterValidator(_encodable)]
Rate = Annotated[float, Field(ge=LEAST_FPS, allow_inf_nan=False)]
Frames = Annotated[list[Text], Field(min_length=1)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Tools = Annotated[list[JsonObject], BeforeValidator(_parsed)]
Calls = Annotated[list[Annotated[JsonObject, AfterValidator(_call)]], BeforeValidator(_parsed)]


def _string_or(other: str) -> Discriminator:
    """Chooses by whether there is a string, so that an error speaks of one shape only."""
    return Discriminator(lambda value: "<string>" if isinstance(value, str) else other)


def _path_or_bytes(value: Any) -> Any:
    """Of what ``datasets`` writes of an image or a sound: its bytes, else its path."""
    if not isinstance(value, dict) or not value.keys() <= {"bytes", "path"}:
        return value
    return value.get("path") if value.get("bytes") is None else value["bytes"]


# The name of an image or a sound, or itself where rows can hold bytes.
File = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[InlineFile, Tag("<bytes>")],
    Discriminator(lambda value: "<bytes>" if isinstance(value, InlineFile) else "<string>"),
    BeforeValidator(_path_or_bytes),
]


class _Schema(BaseModel):
    """A place in a row, or the row, whose keys are used, refused by name, or counted as unused."""

    model_config = ConfigDict(strict=True)
    is_row: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _used(cls, value: Any, info: ValidationInfo) -> Any:
        """The value without what is not used; the one place that decides on it."""
        if not isinstance(value, dict) or info.context is None:  # None: made by ourselves
            return value
        fields = {each.alias or name: each for name, each in cls.model_fields.items()}
        (ignored, unused), used = info.context, {}
        for key, each in value.items():
            no_name = key == "name" and not isinstance(each, str)  # which a template may read
            if key in fields and not no_name:
                if fields[key].is_required() or not _is_empty(each):
                    used[key] = each
            elif not _is_empty(each):
                known = f"LoongPlug knows {', '.join(fields)} there"
                meaning = MEANINGS.get(key, "" if cls.is_row else known)
                if meaning and key not in ignored:
                    reason = meaning if cls.is_row else known
                    shown = key.encode(errors="backslashreplace").decode()
                    raise PydanticCustomError("key", "{reason}", {"key": shown, "reason": reason})
                unused.add(key)
        return used


class TextPart(_Schema):
    type: Literal["text"]
    text: Text


class Url(_Schema):
    url: Text


UrlOrString = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Url, Tag("<object>")], _string_or("<object>")
]

Source = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[Frames, Tag("<frames>")], _string_or("<frames>")
]

_BY_LIST = Discriminator(lambda value: "<list>" if isinstance(value, list) else "<one>")
Files = Annotated[Annotated[File, Tag("<one>")] | Annotated[list[File], Tag("<list>")], _BY_LIST]
Videos = Annotated[Annotated[Text, Tag("<one>")] | Annotated[list[Source], Tag("<list>")], _BY_LIST]


class PartRow(_Schema):
    """Without a source it stands for the next of the row's media of its kind."""

    type: str

    @property
    def kind(self) -> str:
        """Image, video or audio."""
        return self.type.removesuffix("_url")

    @property
    def source(self) -> Any:
        """A name, a video's frames, or an image or a sound itself."""
        found = getattr(self, self.type)
        return found.url if isinstance(found, Url) else found


class ImagePartRow(PartRow):
    type: Literal["image"]
    image: File | None = None


class ImageUrlPart(PartRow):
    type: Literal["image_url"]
    image_url: UrlOrString


class VideoPartRow(PartRow):
    type: Literal["video"]
    video: Source | None = None
    fps: Rate | None = None


class VideoUrlPart(PartRow):
    type: Literal["video_url"]
    video_url: UrlOrString
    fps: Rate | None = None


class AudioPartRow(PartRow):
    type: Literal["audio"]
    audio: File | None = None


class AudioUrlPart(PartRow):
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


class Spoken(_Schema):
    """``loss`` (ms-swift) or ``weight`` (OpenAI) say whether it is trained on."""

    loss: bool | None = None
    weight: Literal[0, 1] | None = None


class MessageRow(Spoken):
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag("<string>")] | Annotated[Parts, Tag("<parts>")], _string_or("<parts>")
    ]
    reasoning_content: Text | None = None
    tool_calls: Calls | None = None
    tool_call_id: Text | None = None
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_alone(cls, value: Any) -> Any:
        calls = isinstance(value, dict) and value.get("tool_calls")
        return value | {"content": value.get("content") or ""} if calls else value


class ChatTurn(Spoken):
    role: Literal["system", "human", "user", "gpt", "assistant"] = Field(alias="from")
    content: Text = Field(alias="value")


class _Row(Spoken):
    """Media beside the text, which has a marker for each; ``fps`` is that of all videos."""

    is_row: ClassVar[bool] = True
    image: Files | None = None
    images: list[File] | None = None
    video: Videos | None = None
    videos: list[Source] | None = None
    audio: Files | None = None
    audios: list[File] | None = None
    fps: Rate | None = None
    task: Any = None  # which `loongplug eval` reads, as it does
    kind: Any = None  # where there is no task

    def media(self, kind: str) -> list[Any]:
        """Images, videos or sounds, in the order of their markers."""
        one, more = getattr(self, kind), getattr(self, f"{kind}s") or []
        return [*(one if isinstance(one, list) else [one] if one else []), *more]


class _ChatRow(_Row):
    system: Text | None = None
    tools: Tools | None = None


class MessagesRow(_ChatRow):
    messages: Annotated[list[MessageRow], Field(min_length=1)]


class ConversationsRow(_ChatRow):
    conversations: Annotated[list[ChatTurn], Field(min_length=1)]


class QueryRow(_ChatRow):
    """As ms-swift once had them: the last question and answer, and the ones before."""

    query: Text
    response: Text
    history: list[Annotated[list[Text], Field(min_length=2, max_length=2)]] | None = None


class AlpacaRow(QueryRow):
    """The same with other keys; a question may have two parts."""

    query: Text = Field(alias="instruction")
    input: Text | None = None
    response: Text = Field(alias="output")


class TextRow(_Row):
    text: Text


AnyRow = MessagesRow | ConversationsRow | AlpacaRow | QueryRow | TextRow
_BY_KEY: tuple[tuple[str, type[AnyRow], str], ...] = (
    ("messages", MessagesRow, '{"messages": [{"role": "user", "content": "..."}, ...]}'),
    (
        "conversations",
        ConversationsRow,
        '{"image": "path", "conversations": [{"from": "human", "value": "<image>\\n..."},'
        ' {"from": "gpt", "value": "..."}]}',
    ),
    ("instruction", AlpacaRow, '{"instruction": "...", "output": "..."}'),
    ("query", QueryRow, '{"query": "...", "response": "..."}'),
    ("text", TextRow, '{"text": "..."}'),
)

ROW_KEYS = frozenset(
    field.alias or name for _, row, _ in _BY_KEY for name, field in row.model_fields.items()
)


def validate_row(row: dict[str, Any], *, ignored: Collection[str]) -> tuple[AnyRow, set[str]]:
    """The row in the format whose key it has, and its unused keys; or ValueError."""
    # Tables that hold several formats write null for those that a row is not in.
    keys = [key for key, _, _ in _BY_KEY if row.get(key) is not None and key not in ignored]
    if len(keys) > 1:
        raise ValueError(
            f"the row has the keys of {len(keys)} formats, {' and '.join(keys)}: keep the"
            " one that is meant, and drop the others or name them in --ignore-keys."
        )
    for key, schema, example in _BY_KEY:
        if key not in (keys or row):
            continue
        try:
            unused: set[str] = set()
            return schema.model_validate(row, context=(ignored, unused)), unused
        except ValidationError as error:
            raise ValueError(f"{described(error, row)}. A row looks like {example}.") from error
    known = " or ".join(f'"{key}" as in {example}' for key, _, example in _BY_KEY)
    raise ValueError(
        f"unknown schema with keys {sorted(row)}: expected {known}; or say by --columns"
        " OURS=THEIRS which keys are meant."
    )


def _is_empty(value: Any) -> bool:
    """Whether a key says nothing: tables have each key in each row, some of them as JSON."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value in ("", [], "[]", "{}")
