"""From a conversation to tokens, and which of them are trained on."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from loongplug.data.chat_template import render_chat
from loongplug.data.conversation import Conversation, Message, Part, VideoPart
from loongplug.data.processor import Processor, VisionTokens
from loongplug.data.special_text import encode_hidden, hide_special

TrainingPhase = Literal["pretrain", "sft"]

_MOST_REASON = 300  # characters of what a template says


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """What stands in the text for an image or a video.

    The chat template writes ``token`` once. ``text`` takes its place, and each ``token`` in
    that text stands for ``run`` tokens.
    """

    token: str
    text: str
    run: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sample before padding, [n]."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]  # whether predicting this token counts


@dataclass(frozen=True)
class _Segment:
    text: str
    trained: bool


def tokenize_conversation(
    conversation: Conversation,
    processor: Processor,
    *,
    phase: TrainingPhase,
    placeholders: Sequence[Placeholder],
) -> Tokens:
    """Apply the chat template and write the images' and videos' placeholders, in their order.

    ``sft`` trains on what the assistant says, its end token included; ``pretrain`` on all text.
    Neither trains on the tokens that mark or stand for images and videos. An assistant's answer
    is tokenized apart from what comes before it, as it is when the model generates it.

    Special tokens come from the template and the placeholders alone, unless ``processor`` allows
    them in the row's text.

    Raises ValueError, with the row's place, for a conversation without anything to train on,
    an image or video token in a text that may have some, and a template that this cannot be done
    with.
    """
    conversation, hidden = _hidden(conversation, processor)
    if conversation.plain:
        segments = _plain_segments(conversation, processor, phase=phase)
    elif phase == "sft":
        segments = _assistant_segments(conversation, processor)
    else:
        text = _render(conversation.messages, processor, where=conversation.where)
        segments = [_Segment(text, True)]
    texts = _write_placeholders(
        [segment.text for segment in segments],
        placeholders,
        tokens=processor.tokens,
        where=conversation.where,
    )
    encoded = _encode(texts, processor, hidden=hidden, where=conversation.where)
    ids = np.array([token for part in encoded for token in part], dtype=np.int64)
    trained = np.empty(len(ids), dtype=np.bool_)
    start = 0
    for segment, part in zip(segments, encoded, strict=True):
        trained[start : start + len(part)] = segment.trained
        start += len(part)
    for token in processor.vision_token_ids:
        trained &= ids != token
    if not placeholders:
        return Tokens(ids=ids, trained=trained)
    repeats = _repeats(ids, processor, placeholders)
    return Tokens(ids=ids.repeat(repeats), trained=trained.repeat(repeats))


def _hidden(
    conversation: Conversation, processor: Processor
) -> tuple[Conversation, Mapping[str, str]]:
    """The conversation with marks for special tokens in its text, and what they stand for."""
    if processor.special_texts is None:
        return conversation, {}
    found = hide_special(conversation.messages, processor.special_texts)
    return dataclasses.replace(conversation, messages=found.messages), found.texts


def _encode(
    texts: Sequence[str], processor: Processor, *, hidden: Mapping[str, str], where: str
) -> list[list[int]]:
    """The ids of each text.

    One by one: a sample's few texts take less time than handing them to the tokenizer's threads,
    of which a machine full of ranks and workers has none to spare.
    """
    tokenizer, special = processor.tokenizer, processor.special_texts
    if hidden:
        assert special is not None
        try:
            return [encode_hidden(text, hidden, special, tokenizer) for text in texts]
        except ValueError as error:
            raise ValueError(f"{where}: {error}.") from error
    if not tokenizer.is_fast:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # which a tokenizer's file may ask for
    backend.no_truncation()
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def _plain_segments(
    conversation: Conversation, processor: Processor, *, phase: TrainingPhase
) -> list[_Segment]:
    """Text without roles, as it is, and an end token behind it."""
    if phase == "sft":
        raise ValueError(
            f"{conversation.where}: plain text has no answers to train on: give messages, or train"
            " with --training-phase pretrain."
        )
    tokens = processor.tokens
    pieces = []
    for message in conversation.messages:
        for part in message.parts:
            if isinstance(part, Part) and part.kind == "text":
                pieces.append(part.value)
            else:
                token = tokens.image if isinstance(part, Part) else tokens.video
                pieces.append(f"{tokens.start}{token}{tokens.end}")
    return [_Segment("".join([*pieces, processor.end_token]), True)]


def tokenize_prompt(
    conversation: Conversation, processor: Processor, *, placeholders: Sequence[Placeholder]
) -> NDArray[np.int64]:
    """The tokens [n] after which the assistant would speak next, placeholders written."""
    conversation, hidden = _hidden(conversation, processor)
    text = _render(conversation.messages, processor, where=conversation.where, prompt=True)
    (text,) = _write_placeholders(
        [text], placeholders, tokens=processor.tokens, where=conversation.where
    )
    (encoded,) = _encode([text], processor, hidden=hidden, where=conversation.where)
    ids = np.array(encoded, dtype=np.int64)
    return np.repeat(ids, _repeats(ids, processor, placeholders))


def shortest_sample(processor: Processor) -> int:
    """How many tokens the template alone takes for an exchange in which nothing is said."""
    messages = (Message("user", ()), Message("assistant", ()))
    text = _render(messages, processor, where=str(processor.folder))
    return len(processor.tokenizer.encode(text, add_special_tokens=False))


def _assistant_segments(conversation: Conversation, processor: Processor) -> list[_Segment]:
    """Cut the rendered text before and after each of the assistant's answers."""
    messages, where = conversation.messages, conversation.where
    segments: list[_Segment] = []
    done = ""
    pending = ""  # text that is not trained on and not yet in a segment
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _render(messages[:number], processor, where=where, prompt=True)
        whole = _render(messages[: number + 1], processor, where=where)
        pending += _continuation(prompt, done, where=where)
        answer = _continuation(whole, prompt, where=where)
        spoken, end, rest = answer.rpartition(processor.end_token)
        if not end:
            raise ValueError(
                f"{where}: the chat template of {processor.folder} does not end an answer with the"
                f" tokenizer's eos_token {processor.end_token!r}: correct one of the two."
            )
        segments += [_Segment(pending, False), _Segment(spoken + end, True)]
        done, pending = whole, rest
    if not segments:
        raise ValueError(
            f"{where}: no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    if messages[-1].role != "assistant":
        pending += _continuation(_render(messages, processor, where=where), done, where=where)
    return [*segments, _Segment(pending, False)]


def _continuation(text: str, beginning: str, *, where: str) -> str:
    if not text.startswith(beginning):
        raise ValueError(
            f"{where}: the chat template renders earlier messages differently once later ones"
            " follow, so the answers cannot be told apart: use a template that only appends."
        )
    return text[len(beginning) :]


def _render(
    messages: Sequence[Message], processor: Processor, *, where: str, prompt: bool = False
) -> str:
    try:
        return render_chat(
            [_as_template_input(message) for message in messages],
            processor.tokenizer,
            prompt=prompt,
        )
    except TemplateError as error:
        reason = str(error)[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template refuses this row: {reason}.") from error
    except Exception as error:  # whatever Python raises for what the template does
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template fails on this row ({reason}).") from error


def _as_template_input(message: Message) -> dict[str, Any]:
    """Text alone goes in as a string, which templates of text models understand as well."""
    if all(isinstance(part, Part) and part.kind == "text" for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {
        "role": message.role,
        "content": [_part_as_template_input(part) for part in message.parts],
    }


def _part_as_template_input(part: Part | VideoPart) -> dict[str, str]:
    if isinstance(part, VideoPart):
        return {"type": "video"}
    return {"type": "text", "text": part.value} if part.kind == "text" else {"type": "image"}


def _write_placeholders(
    texts: Sequence[str], placeholders: Sequence[Placeholder], *, tokens: VisionTokens, where: str
) -> list[str]:
    """The texts with each of the chat template's visual tokens replaced by its placeholder."""
    visual = re.compile(f"{re.escape(tokens.image)}|{re.escape(tokens.video)}")
    written = [token for text in texts for token in visual.findall(text)]
    expected = [placeholder.token for placeholder in placeholders]
    for kind, token in (("image", tokens.image), ("video", tokens.video)):
        if written.count(token) != expected.count(token):
            raise ValueError(
                f"{where}: {written.count(token)} {kind} tokens in the text for"
                f" {expected.count(token)} {kind}s. The chat template writes one for each {kind}:"
                f" remove {token} from the text of the messages and list the {kind}s as parts of"
                " the content."
            )
    if written != expected:
        raise ValueError(
            f"{where}: the chat template writes images and videos in another order than the row"
            " lists them: use a template that keeps their order."
        )
    waiting = iter(placeholders)
    return [visual.sub(lambda _: next(waiting).text, text) for text in texts]


def _repeats(
    ids: NDArray[np.int64], processor: Processor, placeholders: Sequence[Placeholder]
) -> NDArray[np.int64]:
    """How many tokens [n] each of the tokens stands for."""
    repeats = np.ones(len(ids), dtype=np.int64)
    visual = (ids == processor.image_token_id) | (ids == processor.video_token_id)
    repeats[visual] = [
        placeholder.run
        for placeholder in placeholders
        for _ in range(placeholder.text.count(placeholder.token))
    ]
    return repeats
