"""From a conversation to tokens, and which of them are trained on."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from loongplug.data.bad_samples import told
from loongplug.data.conversation import Conversation, Message
from loongplug.data.kinds import KINDS, Placeholder
from loongplug.data.positions import among
from loongplug.data.processor import Processor
from loongplug.data.special_text import (
    After,
    SpecialTexts,
    added_ids,
    encode_hidden,
    encode_text,
    hide_special,
)

TrainingPhase = Literal["pretrain", "sft"]

_MOST_REASON = 300  # characters of what a template says
_MOST_SOURCE = 2**17  # characters of a template, which take seconds to compile
_OPENED = re.compile(r"<[\w:]+>\s*\Z")  # the mark of a thought that a prompt begins
_EMPTY_THOUGHT = re.compile(r"<([\w:]+)>\s*</\1>\s*")
_MAYBE_THOUGHT = re.compile(r"(?:<([\w:]+)>\s*</\1>)?\s*")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sample before padding, [n]: its renderings, one behind the other."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]  # whether predicting this token counts
    lengths: tuple[int, ...]  # tokens of each rendering
    media: tuple[int, ...]  # how many of the row's media, from the first on, each shows
    answers: int  # how many are trained on as such
    turns_differ: bool = False  # whether another --multi-turn makes others of the row


@dataclass(frozen=True)
class _Segment:
    """A piece of a sample that is tokenized apart."""

    text: str
    trained: bool
    ends: bool = False  # the tokenizer's eos_token stands behind it, which the template left out


@dataclass(frozen=True)
class _Rendering:
    """What a chat template makes of a row or its beginning; attention stays within it."""

    segments: Sequence[_Segment]
    messages: Sequence[Message]
    answers: int = 0  # how many are trained on
    alone: bool = True  # whether it shows all answers as they are served

    @property
    def media(self) -> int:
        return sum(not isinstance(part, str) for each in self.messages for part in each.parts)


def tokenize_conversation(
    conversation: Conversation,
    processor: Processor,
    *,
    phase: TrainingPhase | None,
    placeholders: Sequence[Placeholder],
) -> Tokens:
    """Apply the chat template and write the media's placeholders, in their order.

    ``sft`` trains on what the assistant says, its end token included; ``pretrain`` on all text;
    neither on answers that the row leaves out (:attr:`Message.trained`), on what the tokenizer puts
    in front of any text, or on tokens that mark or stand for media. None gives the prompt for the
    assistant's next answer. Where the template ends answers without a token, the tokenizer's
    eos_token is written behind each.

    An answer is tokenized, and trained on, as it is served: behind the prompt that asks for it.
    Where one rendering does not show all so, ``processor.multi_turn`` says what is made. A thought
    without content that the template puts before it is trained on with ``trains_thoughts``. Special
    tokens are those of the template and the placeholders, unless ``processor`` allows the row's.

    Raises ValueError, with the row's place, for a conversation without anything to train on,
    a token of media in a text that may have some, and a template that this cannot be done with.
    """
    with told(f"{conversation.where}: "):
        messages, hidden = conversation.messages, dict[str, str]()  # what marks in the text are
        if processor.special_texts is not None:
            messages, hidden = hide_special(messages, processor.special_texts)
        renderings = _renderings(messages, processor, phase=phase, plain=conversation.plain)
        made = [
            _tokenized(each.segments, processor, placeholders[: each.media], hidden)
            for each in renderings
        ]
    ids, trained = map(np.concatenate, zip(*made, strict=True))
    return Tokens(
        ids=ids,
        trained=trained,
        lengths=tuple(len(each) for each, _ in made),
        media=tuple(each.media for each in renderings),
        answers=sum(each.answers for each in renderings),
        turns_differ=not all(each.alone for each in renderings),
    )


def _tokenized(
    segments: Sequence[_Segment],
    processor: Processor,
    placeholders: Sequence[Placeholder],
    hidden: Mapping[str, str],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The ids of one rendering, and which are trained on: none that mark or stand for media."""
    tokenizer, special = processor.tokenizer, processor.special_texts
    texts = _write_placeholders([each.text for each in segments], placeholders, processor)
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
            ids = encode_hidden(text, hidden, special, tokenizer, after=after)
        else:
            ids = encode_text(text, tokenizer, special=True, after=after)
        if segment.ends:
            ids = [*ids, processor.end_token_id]
        parts.append((ids, segment.trained))
        if ids:
            after = "special" if ids[-1] in added_ids(tokenizer) else "text"
    whole = np.array([token for part, _ in parts for token in part], dtype=np.int64)
    trained = np.repeat([trained for _, trained in parts], [len(part) for part, _ in parts])
    trained &= ~among(whole, processor.token_ids.values())
    repeats = np.ones(len(whole), dtype=np.int64)  # how many tokens each of the tokens stands for
    if placeholders:
        repeats[among(whole, processor.places(*KINDS))] = [
            placeholder.run
            for placeholder in placeholders
            for _ in range(placeholder.text.count(placeholder.token))
        ]
    return whole.repeat(repeats), trained.repeat(repeats)


def tokenize_prompt(
    conversation: Conversation, processor: Processor, *, placeholders: Sequence[Placeholder]
) -> NDArray[np.int64]:
    """The tokens [n] after which the assistant would speak next, placeholders written."""
    return tokenize_conversation(conversation, processor, phase=None, placeholders=placeholders).ids


def shortest_sample(processor: Processor) -> int:
    """How many tokens the template alone takes for an exchange in which nothing is said."""
    messages = (Message("user", ()), Message("assistant", ()))
    with told(f"{processor.folder}: "):
        text = _render(messages, processor)
    tokenizer = processor.tokenizer
    added = len(leading_ids(tokenizer)) + habits_of(tokenizer).leaves_answers_open
    return len(tokenizer.encode(text, add_special_tokens=False)) + added


def _renderings(
    messages: Sequence[Message], processor: Processor, *, phase: TrainingPhase | None, plain: bool
) -> list[_Rendering]:
    if phase == "sft" and not plain:
        return _of_answers(messages, processor)
    if phase is None or not plain:
        left_out = {message.role for message in messages if not message.trained and phase}
        if left_out - {"assistant"}:
            raise ValueError(
                "with --training-phase pretrain, loss and weight can leave out answers"
                " alone: drop them from the other turns."
            )
        text = _render(messages, processor, prompt=phase is None)
        habits = habits_of(processor.tokenizer)
        ends = [at for at, each in enumerate(messages, start=1) if each.role == "assistant"]
        shown = (_render(messages[:end], processor) for end in ends)
        if phase and habits.renders_again and any(_end_of(each, text) < 0 for each in shown):
            raise _differs(splits=not habits.leaves_answers_open)
        # Where the template does not end an answer, it is looked for, so that it can be ended.
        looks = left_out or habits.leaves_answers_open
        looks = looks or any(
            each.fields and each.role == "assistant" and phase for each in messages
        )
        found = _answers(messages, processor) if looks else []
        trained = [answer for answer in found if answer.message.trained and phase]
        _require_read(messages, trained, processor)
        cut = _cut(text, found, trained, processor, others=phase is not None)
        return [_Rendering(cut, messages)]
    if phase == "sft":
        raise ValueError(
            "plain text has no answers to train on: give messages, or train with"
            " --training-phase pretrain."
        )
    parts = (part for message in messages for part in message.parts)
    pieces = (p if isinstance(p, str) else KINDS[p.kind].written(processor) for p in parts)
    return [_Rendering([_Segment("".join(pieces), True, ends=True)], messages)]


@dataclass(frozen=True)
class _Answer:
    """An assistant's message as it is served: behind the prompt that asks for it."""

    number: int  # of the message
    message: Message
    rendering: str  # of the messages up to this one
    start: int  # where in it the answer begins, behind the prompt
    said: int  # where it begins without a thought of nothing that the template puts there
    served: str  # the rendering up to the answer's end
    begin: int  # where the answer begins, with a thought that the prompt opens
    ends: bool  # as of :class:`_Segment`


def _answers(messages: Sequence[Message], processor: Processor) -> list[_Answer]:
    found = []
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = _render(messages[:number], processor, prompt=True)
        whole = _render(messages[: number + 1], processor)
        if not whole.startswith(asked):
            raise _differs(splits=False)
        start = said = len(asked)
        spoken, ends = _ended(whole[start:], message, processor)
        served = asked + spoken
        opened = _OPENED.search(asked)
        begin = opened.start() if opened else start
        empty = _EMPTY_THOUGHT.match(served, begin)
        if empty and start < empty.end() < len(served):
            said = start if f"</{empty[1]}>" in message.text else empty.end()
        found.append(_Answer(number, message, whole, start, said, served, begin, ends))
    return found


def _of_answers(messages: Sequence[Message], processor: Processor) -> list[_Rendering]:
    """The renderings that train each answer as it is served, or those behind the last question."""
    answers = _answers(messages, processor)
    if not answers:
        raise ValueError(
            "no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    groups: list[list[_Answer]] = []  # each is shown by its first one's rendering; the last first
    for answer in reversed([answer for answer in answers if answer.message.trained]):
        group = next((each for each in groups if each[0].served.startswith(answer.served)), [])
        if not group:
            groups.append(group)
        group.append(answer)
    if not groups:
        raise ValueError("no answer is trained on: each has loss false or weight 0. Drop the row.")
    alone = len(groups) == 1
    if processor.multi_turn == "last" and not alone:
        last = groups[0][0].number
        turns = [(each.role, each.text.startswith("<tool_response>")) for each in messages[:last]]
        question = max((at for at, turn in enumerate(turns) if turn == ("user", False)), default=-1)
        groups = [[each for group in groups for each in group if each.number > question]]
    made = []
    _require_read(messages, [each for group in groups for each in group], processor)
    for group in groups:
        shown, text = messages[: group[0].number + 1], group[0].rendering
        if group is groups[0] and len(shown) < len(messages):
            whole = _render(messages, processor)
            if whole.startswith(group[0].served):
                shown, text = messages, whole
        cut = _cut(text, answers, group, processor, others=False)
        made.append(_Rendering(cut, shown, len(group), alone))
    return made[::-1]


def _cut(
    text: str,
    answers: Sequence[_Answer],
    trained: Sequence[_Answer],
    processor: Processor,
    *,
    others: bool,
) -> list[_Segment]:
    """A rendering, cut before and after each answer that it shows; ``others`` train as well."""
    segments, done = [], 0
    for answer in answers:
        start, said, end = answer.start, answer.said, len(answer.served)
        if not text.startswith(answer.served):
            if not (answer in trained or others or answer.ends):
                continue
            start = said = _end_of(answer.served[: answer.begin], text)
            end = _end_of(answer.served, text)
            if end < 0:
                raise _differs(splits=not answer.ends)
        counts = answer in trained
        segments += [
            _Segment(text[done:start], others),
            _Segment(text[start:said], counts and (others or processor.trains_thoughts)),
            _Segment(text[said:end], counts, answer.ends),
        ]
        done = end
    return [*segments, _Segment(text[done:], others)]


def _end_of(part: str, text: str) -> int:
    """Where ``part`` ends in ``text``, which may lack its thoughts of nothing; -1: it is lost."""
    end = 0
    for number, said in enumerate(_EMPTY_THOUGHT.split(part)[::2]):
        if number:
            thought = _MAYBE_THOUGHT.match(text, end)
            assert thought is not None, "it matches everywhere"
            end = thought.end()
        if not text.startswith(said, end):
            return -1
        end += len(said)
    return end


def _differs(*, splits: bool) -> ValueError:
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


def _require_read(
    messages: Sequence[Message], answers: Sequence[_Answer], processor: Processor
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
                whole = whole or _render(messages, processor)
            try:
                same = _render(row, processor).startswith(served.get(number, whole))
            except ValueError:  # the template asks for it
                same = False
            if same:
                raise ValueError(
                    f"the chat template leaves out the {key} of the row: take the template"
                    " of a model that reads them, write them into the text, or drop the row."
                )


def _render(messages: Sequence[Message], processor: Processor, *, prompt: bool = False) -> str:
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


def _write_placeholders(
    texts: Sequence[str], placeholders: Sequence[Placeholder], processor: Processor
) -> list[str]:
    """The texts with each of the chat template's tokens of media replaced by its placeholder."""
    kinds = {kind: processor.tokens.get(f"{kind}_token_id") for kind in KINDS}
    ours = re.compile("|".join(re.escape(token) for token in kinds.values() if token is not None))
    written = [token for text in texts for token in ours.findall(text)]
    expected = [placeholder.token for placeholder in placeholders]
    for kind, token in kinds.items():
        if token is not None and written.count(token) != expected.count(token):
            raise ValueError(
                f"{written.count(token)} {kind} tokens in the text for"
                f" {expected.count(token)} {kind}s. The chat template writes one for each {kind}:"
                f" remove {token} from the text of the messages and list the {kind}s as parts of"
                " the content."
            )
    if written != expected:
        raise ValueError(
            "the chat template writes media in another order than the row"
            " lists them: use a template that keeps their order."
        )
    waiting = iter(placeholders)
    return [ours.sub(lambda _: next(waiting).text, text) for text in texts]


def render_chat(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text of one conversation; with ``prompt``, the beginning of an answer follows.

    Raises jinja2.TemplateError where the template refuses the conversation, or is too long.
    """
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

    def rendered(*, as_parts: bool, count: int = 2) -> str:
        try:
            inputs = [_as_template_input(turn, as_parts=as_parts) for turn in turns[:count]]
            return render_chat(inputs, tokenizer)
        except Exception:  # which the first row tells
            return ""

    text = rendered(as_parts=False)
    if as_parts := said not in text and said in (found := rendered(as_parts=True)):
        text = found
    _, spoken, behind = text.rpartition(said)
    special = SpecialTexts.of(tokenizer, more=())
    return _Habits(
        takes_parts_alone=as_parts,
        leaves_answers_open=bool(spoken) and special.pattern.search(behind) is None,
        renders_again=not rendered(as_parts=as_parts, count=3).startswith(text),
    )


@lru_cache(maxsize=32)
def leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text: bos of Llama's kind, nothing of Qwen's."""
    ids = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    return tuple(ids[: ids.index(bos) + 1]) if bos in ids else ()
