"""From a conversation to tokens, and which of them are trained on."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from loongplug.data.bounded_template import bounded_template, render_bounded
from loongplug.data.conversation import AudioPart, Conversation, ImagePart, Message, Part
from loongplug.data.processor import MediaTokens, Processor
from loongplug.data.special_text import (
    After,
    SpecialTexts,
    encode_hidden,
    encode_text,
    hide_special,
    is_added,
)
from loongplug.data.token_ids import among

TrainingPhase = Literal["pretrain", "sft"]

_MOST_REASON = 300  # characters of what a template says


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """What stands in the text for an image, a video or a sound.

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
    """A piece of a sample that is tokenized apart."""

    text: str
    trained: bool
    ends: bool = False  # the tokenizer's eos_token stands behind it, which the template left out


def tokenize_conversation(
    conversation: Conversation,
    processor: Processor,
    *,
    phase: TrainingPhase | None,
    placeholders: Sequence[Placeholder],
) -> Tokens:
    """Apply the chat template and write the media's placeholders, in their order.

    ``sft`` trains on what the assistant says, its end token included; ``pretrain`` on all text;
    neither on answers that the row leaves out (:attr:`Message.trained`). Where the template ends
    answers without a token, the tokenizer's eos_token is written behind each answer's text. What
    the tokenizer puts in front of any text stands in front of the sample and is not trained on.
    Neither trains on the tokens that mark or stand for media. An assistant's answer
    is tokenized apart from what comes before it, as it is when the model generates it. None gives
    the prompt for the assistant's next answer, of which nothing is trained on.

    Special tokens come from the template and the placeholders alone, unless ``processor`` allows
    them in the row's text.

    Raises ValueError, with the row's place, for a conversation without anything to train on,
    a token of media in a text that may have some, and a template that this cannot be done with.
    """
    where, tokenizer, special = conversation.where, processor.tokenizer, processor.special_texts
    hidden: dict[str, str] = {}  # what marks in the text stand for
    if special is not None:
        messages, hidden = hide_special(conversation.messages, special)
        conversation = dataclasses.replace(conversation, messages=messages)
    segments = _segments(conversation, processor, phase=phase)
    texts = _write_placeholders(
        [segment.text for segment in segments], placeholders, tokens=processor.tokens, where=where
    )
    parts: list[tuple[list[int], bool]] = []
    leading = leading_ids(tokenizer)
    if leading and not texts[0].startswith(tokenizer.bos_token):
        parts.append((list(leading), False))
    after: After = "nothing"
    # One by one: a sample's few texts take less time than handing them to the tokenizer's threads,
    # of which a machine full of ranks and workers has none to spare.
    for text, segment in zip(texts, segments, strict=True):
        if hidden:
            assert special is not None
            try:
                ids = encode_hidden(text, hidden, special, tokenizer, after=after)
            except ValueError as error:
                raise ValueError(f"{where}: {error}.") from error
        else:
            ids = encode_text(text, tokenizer, special=True, after=after)
        if segment.ends:
            ids = [*ids, processor.end_token_id]
        parts.append((ids, segment.trained))
        if ids:
            after = "special" if is_added(ids[-1], tokenizer) else "text"
    return _tokens(parts, processor, placeholders=placeholders)


def _tokens(
    parts: Sequence[tuple[list[int], bool]],
    processor: Processor,
    *,
    placeholders: Sequence[Placeholder],
) -> Tokens:
    """Pieces with whether they are trained on as one, each placeholder's token as often as it is.

    Those that mark or stand for media are not trained on.
    """
    ids = np.array([token for part, _ in parts for token in part], dtype=np.int64)
    trained = np.repeat([trained for _, trained in parts], [len(part) for part, _ in parts])
    trained &= ~among(ids, processor.untrained_token_ids)
    if not placeholders:
        return Tokens(ids=ids, trained=trained)
    repeats = np.ones(len(ids), dtype=np.int64)  # how many tokens each of the tokens stands for
    repeats[among(ids, processor.media_token_ids)] = [
        placeholder.run
        for placeholder in placeholders
        for _ in range(placeholder.text.count(placeholder.token))
    ]
    return Tokens(ids=ids.repeat(repeats), trained=trained.repeat(repeats))


def tokenize_prompt(
    conversation: Conversation, processor: Processor, *, placeholders: Sequence[Placeholder]
) -> NDArray[np.int64]:
    """The tokens [n] after which the assistant would speak next, placeholders written."""
    return tokenize_conversation(conversation, processor, phase=None, placeholders=placeholders).ids


def shortest_sample(processor: Processor) -> int:
    """How many tokens the template alone takes for an exchange in which nothing is said."""
    messages = (Message("user", ()), Message("assistant", ()))
    text = _render(messages, processor, where=str(processor.folder))
    tokenizer = processor.tokenizer
    added = len(leading_ids(tokenizer)) + _habits_of(tokenizer).leaves_answers_open
    return len(tokenizer.encode(text, add_special_tokens=False)) + added


def _segments(
    conversation: Conversation, processor: Processor, *, phase: TrainingPhase | None
) -> list[_Segment]:
    messages, where = conversation.messages, conversation.where
    # Then each answer is looked for, so that it can be ended.
    opens = _habits_of(processor.tokenizer).leaves_answers_open and any(
        message.role == "assistant" for message in messages
    )
    if phase is None:
        if opens:
            cut = _cut(messages, processor, prompt=True, where=where)
            return [_Segment(piece.text, False, piece.ends) for piece in cut]
        return [_Segment(_render(messages, processor, where=where, prompt=True), False)]
    if not conversation.plain:
        left_out = [message.role for message in messages if not message.trained]
        if phase == "pretrain" and {*left_out} - {"assistant"}:
            raise ValueError(
                f"{where}: with --training-phase pretrain, loss and weight can leave out answers"
                " alone: drop them from the other turns."
            )
        if phase == "sft" or left_out or opens:
            others = phase == "pretrain"
            return _assistant_segments(messages, processor, others=others, where=where)
        return [_Segment(_render(messages, processor, where=where), True)]
    if phase == "sft":
        raise ValueError(
            f"{where}: plain text has no answers to train on: give messages, or train with"
            " --training-phase pretrain."
        )
    tokens, pieces = processor.tokens, []
    for part in (part for message in messages for part in message.parts):
        if isinstance(part, str):
            pieces.append(part)
        else:
            start, end = tokens.start, tokens.end
            if isinstance(part, AudioPart):
                token, start, end = tokens.audio, tokens.audio_start, tokens.audio_end
            else:
                token = tokens.image if isinstance(part, ImagePart) else tokens.video
            assert token is not None, "open_medium refuses the row"
            pieces.append(f"{start or ''}{token}{end or ''}")
    return [_Segment("".join(pieces), True, ends=True)]


def _assistant_segments(
    messages: Sequence[Message], processor: Processor, *, others: bool, where: str
) -> list[_Segment]:
    """The rendered text, cut before and after each of the assistant's answers.

    ``others``: what is no answer is trained on, too.
    """
    cut = _cut(messages, processor, prompt=False, where=where)
    if not any(piece.answer for piece in cut):
        raise ValueError(
            f"{where}: no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    segments = [
        _Segment(piece.text, piece.answer.trained if piece.answer else others, piece.ends)
        for piece in cut
    ]
    if not any(segment.trained for segment in segments):
        raise ValueError(
            f"{where}: no answer is trained on: each has loss false or weight 0. Drop the row."
        )
    return segments


@dataclass(frozen=True)
class _Piece:
    text: str
    answer: Message | None  # whose text it is, its end included
    ends: bool = False  # as of :class:`_Segment`


def _cut(
    messages: Sequence[Message], processor: Processor, *, prompt: bool, where: str
) -> list[_Piece]:
    """The rendered text, cut before and after each of the assistant's answers.

    ``prompt``: with the beginning of one more answer.
    """
    pieces: list[_Piece] = []
    done = ""
    pending = ""  # text that is no answer's and not yet in a piece
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = _render(messages[:number], processor, where=where, prompt=True)
        whole = _render(messages[: number + 1], processor, where=where)
        pending += _continuation(asked, done, where=where)
        answer = _continuation(whole, asked, where=where)
        spoken, rest, ends = _ended(answer, message, processor, where=where)
        pieces += [_Piece(pending, None), _Piece(spoken, message, ends)]
        done, pending = whole, rest
    if prompt or not messages or messages[-1].role != "assistant":
        whole = _render(messages, processor, where=where, prompt=prompt)
        pending += _continuation(whole, done, where=where)
    return [*pieces, _Piece(pending, None)]


def _ended(
    answer: str, message: Message, processor: Processor, *, where: str
) -> tuple[str, str, bool]:
    """What is rendered of an answer up to its end, what follows, and whether the end is missing."""
    if not _habits_of(processor.tokenizer).leaves_answers_open:
        spoken, end, rest = answer.rpartition(processor.end_token)
        if not end:
            raise ValueError(
                f"{where}: the chat template of {processor.folder} does not end an answer with the"
                f" tokenizer's eos_token {processor.end_token!r}: correct one of the two."
            )
        return spoken + end, rest, False
    texts = [part for part in message.parts if isinstance(part, str) and part.strip()]
    said = texts[-1] if texts else ""
    for text in (said, said.strip()):
        if (start := answer.rfind(text)) >= 0:
            end_of_text = start + len(text)
            return answer[:end_of_text], answer[end_of_text:], True
    raise ValueError(
        f"{where}: the chat template of {processor.folder} neither ends an answer with the"
        f" tokenizer's eos_token {processor.end_token!r} nor writes its text as it is, so that"
        " nothing says where it ends: let the template write the token."
    )


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
    as_parts = _habits_of(processor.tokenizer).takes_parts_alone
    inputs = [_as_template_input(message, as_parts=as_parts) for message in messages]
    try:
        return render_chat(inputs, processor.tokenizer, prompt=prompt)
    except TemplateError as error:
        reason = str(error)[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template refuses this row: {reason}.") from error
    except Exception as error:  # whatever Python raises for what the template does
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template fails on this row ({reason}).") from error


def _as_template_input(message: Message, *, as_parts: bool) -> dict[str, Any]:
    """Text alone goes in as a string, which templates of text models understand as well.

    ``as_parts``: not so for this template.
    """
    if not as_parts and all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {"role": message.role, "content": [_part_input(part) for part in message.parts]}


def _part_input(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, AudioPart):
        return {"type": "audio"}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _write_placeholders(
    texts: Sequence[str], placeholders: Sequence[Placeholder], *, tokens: MediaTokens, where: str
) -> list[str]:
    """The texts with each of the chat template's tokens of media replaced by its placeholder."""
    kinds = (("image", tokens.image), ("video", tokens.video), ("audio", tokens.audio))
    ours = re.compile("|".join(re.escape(token) for _, token in kinds if token is not None))
    written = [token for text in texts for token in ours.findall(text)]
    expected = [placeholder.token for placeholder in placeholders]
    for kind, token in kinds:
        if token is not None and written.count(token) != expected.count(token):
            raise ValueError(
                f"{where}: {written.count(token)} {kind} tokens in the text for"
                f" {expected.count(token)} {kind}s. The chat template writes one for each {kind}:"
                f" remove {token} from the text of the messages and list the {kind}s as parts of"
                " the content."
            )
    if written != expected:
        raise ValueError(
            f"{where}: the chat template writes media in another order than the row"
            " lists them: use a template that keeps their order."
        )
    waiting = iter(placeholders)
    return [ours.sub(lambda _: next(waiting).text, text) for text in texts]


def render_chat(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    """The text that ``tokenizer.apply_chat_template`` renders of one conversation.

    ``messages`` are of strings, lists and dictionaries alone. With ``prompt``, the beginning of an
    answer follows.

    What templates may use is what the tokenizer's own environment has, with bounds on what they do
    (:mod:`loongplug.data.bounded_template`). What is left out is its search through tools,
    documents and foreign objects, which takes as long as rendering does. A tokenizer class with an
    ``apply_chat_template`` of its own is asked, without bounds.

    Raises jinja2.TemplateError where the template refuses the conversation or does too much.
    """
    usual = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    # It may have another name in another transformers.
    if not hasattr(chat_template_utils, "_compile_jinja_template") or not usual:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text
    return render_bounded(
        bounded_template(tokenizer.get_chat_template(), _usual_environment()),
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=prompt,
        **_special_tokens(tokenizer),
    )


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """By their names, as templates know them; the tokenizer would look them up each time."""
    return dict(tokenizer.special_tokens_map)


@cache
def _usual_environment() -> Environment:
    """What transformers gives to templates; it makes one for each, here for one of no text."""
    environment: Environment = chat_template_utils._compile_jinja_template("").environment
    return environment


@dataclass(frozen=True)
class _Habits:
    """What a chat template does otherwise than most."""

    takes_parts_alone: bool  # it passes over a content that is a string; LLaVA's
    leaves_answers_open: bool  # it writes no token behind an answer; LLaVA's


def _habits_of(tokenizer: PreTrainedTokenizerBase) -> _Habits:
    """Those of the tokenizer's template, found by a try."""
    return _tried(tokenizer, tokenizer.get_chat_template())


@lru_cache(maxsize=32)
def _tried(tokenizer: PreTrainedTokenizerBase, template: str) -> _Habits:
    asked, said = "1234567", "7654321"

    def rendered(*, as_parts: bool) -> str:
        turns = (Message("user", (asked,)), Message("assistant", (said,)))
        try:
            inputs = [_as_template_input(turn, as_parts=as_parts) for turn in turns]
            return render_chat(inputs, tokenizer)
        except Exception:  # which the first row tells
            return ""

    text = rendered(as_parts=False)
    as_parts = said not in text and said in (found := rendered(as_parts=True))
    _, spoken, behind = (found if as_parts else text).rpartition(said)
    special = SpecialTexts.of(tokenizer, more=())
    return _Habits(
        takes_parts_alone=as_parts,
        leaves_answers_open=bool(spoken) and special.pattern.search(behind) is None,
    )


@lru_cache(maxsize=32)
def leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text: bos of Llama's kind, nothing of Qwen's."""
    ids = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    return tuple(ids[: ids.index(bos) + 1]) if bos in ids else ()
