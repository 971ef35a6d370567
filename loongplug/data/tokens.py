"""From a conversation to tokens, and which of them are trained on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loongplug.data.chat_template import (
    EMPTY_THOUGHT,
    After,
    Answer,
    added_ids,
    answers_of,
    encode_text,
    habits_of,
    leading_ids,
    rendered,
    renders_differently,
    require_read,
)
from loongplug.data.conversation import Conversation, Message, joined_texts
from loongplug.data.media_kinds import KINDS, Placeholder
from loongplug.data.processor import Processor
from loongplug.data.sample import among, bad_as, told
from loongplug.data.special_text import encode_hidden, hide_special

TrainingPhase = Literal["pretrain", "sft"]
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
    neither on answers that the row leaves out, on what the tokenizer puts in front of any text, or
    on tokens that mark or stand for media. None gives the prompt for the assistant's next answer.

    An answer is tokenized, and trained on, as it is served: behind the prompt that asks for it.
    Where one rendering does not show all so, ``processor.multi_turn`` says what is made. ValueError
    where there is nothing to train on, or the template cannot do this.
    """
    with told(f"{conversation.where}: "):
        messages, hidden = conversation.messages, dict[str, str]()  # what marks in the text are
        special = processor.special_texts
        if special is not None and special.pattern.search(joined_texts(messages)) is not None:
            messages, hidden = hide_special(messages, special)
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
        text = rendered(messages, processor, prompt=phase is None)
        habits = habits_of(processor.tokenizer)
        ends = [at for at, each in enumerate(messages, start=1) if each.role == "assistant"]
        shown = (rendered(messages[:end], processor) for end in ends)
        if phase and habits.renders_again and any(_end_of(each, text) < 0 for each in shown):
            raise renders_differently(splits=not habits.leaves_answers_open)
        # Where the template does not end an answer, it is looked for, so that it can be ended.
        looks = left_out or habits.leaves_answers_open
        looks = looks or any(
            each.fields and each.role == "assistant" and phase for each in messages
        )
        found = answers_of(messages, processor) if looks else []
        trained = [answer for answer in found if answer.message.trained and phase]
        require_read(messages, trained, processor)
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


def _of_answers(messages: Sequence[Message], processor: Processor) -> list[_Rendering]:
    """The renderings that train each answer as it is served, or those behind the last question."""
    answers = answers_of(messages, processor)
    if not answers:
        raise ValueError(
            "no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    groups: list[list[Answer]] = []  # each is shown by its first one's rendering; the last first
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
    require_read(messages, [each for group in groups for each in group], processor)
    for group in groups:
        shown, text = messages[: group[0].number + 1], group[0].rendering
        if group is groups[0] and len(shown) < len(messages):
            whole = rendered(messages, processor)
            if whole.startswith(group[0].served):
                shown, text = messages, whole
        cut = _cut(text, answers, group, processor, others=False)
        made.append(_Rendering(cut, shown, len(group), alone))
    return made[::-1]


def _cut(
    text: str,
    answers: Sequence[Answer],
    trained: Sequence[Answer],
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
                raise renders_differently(splits=not answer.ends)
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
    for number, said in enumerate(EMPTY_THOUGHT.split(part)[::2]):
        if number:
            thought = _MAYBE_THOUGHT.match(text, end)
            assert thought is not None, "it matches everywhere"
            end = thought.end()
        if not text.startswith(said, end):
            return -1
        end += len(said)
    return end


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


def require_length(*renderings: int, where: str, seq_length: float) -> None:
    """BadSampleError for a sample whose renderings have more tokens than a sequence."""
    with bad_as("length"):
        if (tokens := sum(renderings)) > seq_length:
            turns = cure = ""
            if len(renderings) > 1:
                turns = f" in {len(renderings)} renderings of its turns"
                cure = "give --multi-turn last, "
            raise ValueError(
                f"{where}: the sample has {tokens} tokens{turns}, but --seq-length is {seq_length}:"
                f" raise it, {cure}or shorten or drop the sample."
            )
