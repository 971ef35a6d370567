"""Chats as the folder's template renders them, and texts as its tokenizer encodes them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from loongplug.data.conversation import Message
from loongplug.data.processor import Processor, SpecialTexts

_MOST_REASON = 300  # characters of what a template says
_MOST_SOURCE = 2**17  # characters of a template, which take seconds to compile
_OPENED = re.compile(r"<[\w:]+>\s*\Z")  # the mark of a thought that a prompt begins
EMPTY_THOUGHT = re.compile(r"<([\w:]+)>\s*</\1>\s*")
After = Literal["nothing", "text", "special"]  # what a piece of a sample's text stands behind
_LINE = "\n"  # which tokenizers keep apart from what follows


@dataclass(frozen=True)
class Answer:
    """An assistant's message as it is served: behind the prompt that asks for it."""

    number: int  # of the message
    message: Message
    rendering: str  # of the messages up to this one
    start: int  # where in it the answer begins, behind the prompt
    said: int  # where it begins without a thought of nothing that the template puts there
    served: str  # the rendering up to the answer's end
    begin: int  # where the answer begins, with a thought that the prompt opens
    ends: bool  # the tokenizer's eos_token stands behind it, which the template left out


def answers_of(messages: Sequence[Message], processor: Processor) -> list[Answer]:
    """Each of the assistant's messages; ValueError where one is not behind its prompt."""
    found = []
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = rendered(messages[:number], processor, prompt=True)
        whole = rendered(messages[: number + 1], processor)
        if not whole.startswith(asked):
            raise renders_differently(splits=False)
        start = said = len(asked)
        spoken, ends = _ended(whole[start:], message, processor)
        served = asked + spoken
        opened = _OPENED.search(asked)
        begin = opened.start() if opened else start
        empty = EMPTY_THOUGHT.match(served, begin)
        if empty and start < empty.end() < len(served):
            said = start if f"</{empty[1]}>" in message.text else empty.end()
        found.append(Answer(number, message, whole, start, said, served, begin, ends))
    return found


def renders_differently(*, splits: bool) -> ValueError:
    """What to tell of a template that changes earlier turns; ``splits``: renderings may help."""
    more = " train by sft with --packing and --multi-turn split," if splits else ""
    return ValueError(
        f"the chat template renders earlier messages differently once later ones follow,"
        f" so what they say is lost or not found: use a template that only appends,{more} or drop"
        " what it leaves out, such as earlier thoughts."
    )


def _ended(answer: str, message: Message, processor: Processor) -> tuple[str, bool]:
    """What is rendered of an answer up to its end, and whether the end is missing."""
    if not habits_of(processor.tokenizer).leaves_answers_open:
        spoken, end, _ = answer.rpartition(processor.end_token)
        if not end:
            raise ValueError(
                f"the chat template of {processor.folder} does not end an answer with the"
                f" tokenizer's eos_token {processor.end_token!r}: correct one of the two."
            )
        return spoken + end, False
    texts = [part for part in message.parts if isinstance(part, str) and part.strip()]
    said = texts[-1] if texts else ""
    for text in (said, said.strip()):
        if (start := answer.rfind(text)) >= 0:
            return answer[: start + len(text)], True
    raise ValueError(
        f"the chat template of {processor.folder} neither ends an answer with the"
        f" tokenizer's eos_token {processor.end_token!r} nor writes its text as it is, so that"
        " nothing says where it ends: let the template write the token."
    )


def _without(message: Message) -> Iterator[tuple[str, Message]]:
    """What a template may leave out of a message, and the message without it."""
    if message.tools:
        yield "tools", dataclasses.replace(message, tools=())
    if message.role == "tool" and message.text.strip():
        yield "results (role tool)", dataclasses.replace(message, parts=())
    if message.fields.get("reasoning_content", "").strip():
        fields = {**message.fields, "reasoning_content": ""}
        yield "reasoning_content", dataclasses.replace(message, fields=fields)
    calls = message.fields.get("tool_calls", [])
    for number, call in enumerate(calls):
        function = call.get("function", call)
        function = function | {"arguments": {} if function["arguments"] else {"x": 1}}
        other = call | {"function": function} if "function" in call else function
        changed = [*calls[:number], other, *calls[number + 1 :]]
        fields = {**message.fields, "tool_calls": changed}
        yield "tool_calls", dataclasses.replace(message, fields=fields)


def require_read(
    messages: Sequence[Message], answers: Sequence[Answer], processor: Processor
) -> None:
    """Refuse a row whose tools, results or fields of ``answers`` the template leaves out."""
    served, whole = {answer.number: answer.served for answer in answers}, ""
    for number, message in enumerate(messages):
        for key, changed in _without(message):
            if message.role == "assistant" and number not in served:
                continue
            end = number + 1 if number in served else len(messages)
            row = [*messages[:number], changed, *messages[number + 1 : end]]
            if number not in served:
                whole = whole or rendered(messages, processor)
            try:
                same = rendered(row, processor).startswith(served.get(number, whole))
            except ValueError:  # the template asks for it
                same = False
            if same:
                raise ValueError(
                    f"the chat template leaves out the {key} of the row: take the template"
                    " of a model that reads them, write them into the text, or drop the row."
                )


def rendered(messages: Sequence[Message], processor: Processor, *, prompt: bool = False) -> str:
    """The messages' text, by the folder's template; ValueError with what it says against them."""
    as_parts = habits_of(processor.tokenizer).takes_parts_alone
    inputs = [_as_template_input(message, as_parts=as_parts) for message in messages]
    tools = list(messages[0].tools) if messages else []
    try:
        return render_chat(inputs, processor.tokenizer, prompt=prompt, tools=tools or None)
    except TemplateError as error:
        reason = str(error)[:_MOST_REASON].rstrip(".")
        raise ValueError(f"the chat template refuses this row: {reason}.") from error
    except Exception as error:  # whatever Python raises for what the template does
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON].rstrip(".")
        raise ValueError(f"the chat template fails on this row ({reason}).") from error


def _as_template_input(message: Message, *, as_parts: bool) -> dict[str, Any]:
    """Text alone goes in as a string, which text models' templates read, unless ``as_parts``."""
    if not as_parts and all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": message.text, **message.fields}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in message.parts
    ]
    return {"role": message.role, "content": content, **message.fields}


def render_chat(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text of one conversation, and with ``prompt`` the beginning of an answer."""
    if len(tokenizer.get_chat_template()) > _MOST_SOURCE:
        raise TemplateError(f"it is longer than {_MOST_SOURCE:,} characters")
    offered: dict[str, Any] = {} if tools is None else {"tools": tools}
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **offered
    )
    assert isinstance(text, str)
    return text


@dataclass(frozen=True)
class _Habits:
    """What a chat template does otherwise than most."""

    takes_parts_alone: bool  # it passes over a content that is a string; LLaVA's
    leaves_answers_open: bool  # it writes no token behind an answer; LLaVA's
    renders_again: bool  # it drops the thoughts of earlier turns; Qwen3's


def habits_of(tokenizer: PreTrainedTokenizerBase) -> _Habits:
    """Those of the tokenizer's template, found by a try."""
    return _tried(tokenizer, tokenizer.get_chat_template())


@lru_cache(maxsize=32)
def _tried(tokenizer: PreTrainedTokenizerBase, template: str) -> _Habits:
    asked, said = Message("user", ("1234567",)), "7654321"
    turns = (asked, Message("assistant", (f"<think>\n1\n</think>\n\n{said}",)), asked)

    def tried(*, as_parts: bool, count: int = 2) -> str:
        try:
            inputs = [_as_template_input(turn, as_parts=as_parts) for turn in turns[:count]]
            return render_chat(inputs, tokenizer)
        except Exception:  # which the first row tells
            return ""

    text = tried(as_parts=False)
    if as_parts := said not in text and said in (found := tried(as_parts=True)):
        text = found
    _, spoken, behind = text.rpartition(said)
    special = SpecialTexts.of(tokenizer, more=())
    return _Habits(
        takes_parts_alone=as_parts,
        leaves_answers_open=bool(spoken) and special.pattern.search(behind) is None,
        renders_again=not tried(as_parts=as_parts, count=3).startswith(text),
    )


@lru_cache(maxsize=32)
def leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text: bos of Llama's kind, nothing of Qwen's."""
    ids = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    return tuple(ids[: ids.index(bos) + 1]) if bos in ids else ()


def encode_text(text: str, tokenizer: Any, *, special: bool, after: After = "nothing") -> list[int]:
    """The ids of a text ``after`` another; if not ``special``, special tokens in it are text."""
    if not text:
        return []
    if after == "nothing" or _begins_alike(tokenizer, after):
        return _encoded(text, tokenizer, special=special)
    line = _encoded(_LINE, tokenizer, special=special)
    ids = _encoded(_LINE + text, tokenizer, special=special)
    if ids[: len(line)] != line:  # a line that the tokenizer joins to this text
        return _encoded(text, tokenizer, special=special)
    return ids[len(line) :]


@lru_cache(maxsize=8)
def added_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that texts are split at, as special tokens are."""
    return frozenset(tokenizer.added_tokens_decoder)


@lru_cache(maxsize=32)
def _begins_alike(tokenizer: Any, after: After) -> bool:
    """Whether a text behind another, or behind a special token, has the ids that it has alone."""
    probe = "a"
    alone = _encoded(probe, tokenizer, special=True)
    line = _encoded(_LINE, tokenizer, special=True)
    behind_line = _encoded(_LINE + probe, tokenizer, special=True)
    if behind_line == [*line, *alone] or behind_line[: len(line)] != line:
        return True
    if after == "text":
        return False
    end = tokenizer.eos_token
    return _encoded(end + probe, tokenizer, special=True)[1:] != behind_line[len(line) :]


def _encoded(text: str, tokenizer: Any, *, special: bool) -> list[int]:
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "split_special_tokens": not special}
        ids: list[int] = tokenizer(text, **options)["input_ids"]
        return ids
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # which a tokenizer's file may ask for
    backend.no_truncation()
    backend.encode_special_tokens = not special  # a tokenizer's word for: they are text
    try:
        found: list[int] = backend.encode(text, add_special_tokens=False).ids
        return found
    finally:
        backend.encode_special_tokens = False
