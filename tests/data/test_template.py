"""Tokens and what is trained on, against samples labelled by hand."""

import copy
import dataclasses

import pytest

from loongplug.data.conversation import Conversation, Message, Part
from loongplug.data.processor import Processor
from loongplug.data.template import (
    Tokens,
    TrainingPhase,
    shortest_sample,
    tokenize_conversation,
    tokenize_prompt,
)

pytestmark = pytest.mark.quick


def conversation(*messages: tuple[str, str | list[Part]]) -> Conversation:
    return Conversation(
        messages=tuple(
            Message(role, (Part("text", content),) if isinstance(content, str) else tuple(content))
            for role, content in messages
        ),
        where="rows.jsonl:3",
    )


def marked(tokens: Tokens, processor: Processor) -> str:
    """The tokens in one string, those that are trained on in brackets."""
    names = processor.tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    assert len(names) == len(tokens.trained)
    return " ".join(
        (f"[{name}]" if trained else name).replace("\n", "NL")
        for name, trained in zip(names, tokens.trained, strict=True)
    )


PICTURE = Part("image", "a.png")
ONE_TURN = conversation(
    ("user", [PICTURE, PICTURE, Part("text", "Read the digits.")]), ("assistant", "31")
)
TWO_TURNS = conversation(
    ("system", "How are: 2"),
    ("user", [Part("text", "Read"), PICTURE]),
    ("assistant", "31"),
    ("user", "+31"),
    ("assistant", "13"),
)

S, E = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(
    ("sample", "phase", "counts", "expected"),
    [
        (
            ONE_TURN,
            "sft",
            [1, 2],
            f"{S} user NL <|vision_start|> <|image_pad|> <|vision_end|> <|vision_start|>"
            " <|image_pad|> <|image_pad|> <|vision_end|> Read ▁the ▁digits ."
            f" {E} NL {S} assistant NL [3] [1] [{E}] NL",
        ),
        (
            ONE_TURN,
            "pretrain",
            [1, 1],
            f"[{S}] [user] [NL] <|vision_start|> <|image_pad|> <|vision_end|> <|vision_start|>"
            " <|image_pad|> <|vision_end|> [Read] [▁the] [▁digits] [.]"
            f" [{E}] [NL] [{S}] [assistant] [NL] [3] [1] [{E}] [NL]",
        ),
        (
            TWO_TURNS,
            "sft",
            [1],
            f"{S} system NL How ▁are : ▁ 2 {E} NL {S} user NL Read <|vision_start|> <|image_pad|>"
            f" <|vision_end|> {E} NL {S} assistant NL [3] [1] [{E}] NL {S} user NL + 3 1"
            f" {E} NL {S} assistant NL [1] [3] [{E}] NL",
        ),
        (
            conversation(("user", "Read"), ("assistant", "1"), ("user", "2")),
            "sft",
            [],
            f"{S} user NL Read {E} NL {S} assistant NL [1] [{E}] NL {S} user NL 2 {E} NL",
        ),
        (
            conversation(("user", "Read"), ("assistant", "")),
            "sft",
            [],
            f"{S} user NL Read {E} NL {S} assistant NL [{E}] NL",
        ),
        (
            conversation(("user", "Read")),
            "pretrain",
            [],
            f"[{S}] [user] [NL] [Read] [{E}] [NL]",
        ),
    ],
)
def test_tokens_and_labels_as_by_hand(
    processor: Processor,
    sample: Conversation,
    phase: TrainingPhase,
    counts: list[int],
    expected: str,
) -> None:
    tokens = tokenize_conversation(sample, processor, phase=phase, image_token_counts=counts)
    assert marked(tokens, processor) == expected


def test_prompt_is_the_sample_up_to_the_answer(processor: Processor) -> None:
    whole = tokenize_conversation(ONE_TURN, processor, phase="sft", image_token_counts=[2, 1])
    question = Conversation(messages=ONE_TURN.messages[:1], where="rows.jsonl:3")
    prompt = tokenize_prompt(question, processor, image_token_counts=[2, 1])
    assert prompt.tolist() == whole.ids[: whole.trained.argmax()].tolist()


def test_shortest_sample(processor: Processor) -> None:
    empty = conversation(("user", ""), ("assistant", ""))
    tokens = tokenize_conversation(empty, processor, phase="sft", image_token_counts=[])
    assert shortest_sample(processor) == len(tokens.ids) == 10


def with_template(processor: Processor, template: str) -> Processor:
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = template
    return dataclasses.replace(processor, tokenizer=tokenizer)


def for_each_message(body: str) -> str:
    return "{% for message in messages %}" + body + "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            for_each_message("{{ message.content }}"),
            "does not end an answer with the tokenizer's eos_token",
        ),
        (
            for_each_message("{{ message.content if loop.last else 'x' }}<|im_end|>"),
            "renders earlier messages differently",
        ),
        (
            for_each_message("{{ raise_exception('no system messages') }}"),
            "refuses this row: no system",
        ),
    ],
)
def test_templates_that_cannot_be_used(processor: Processor, template: str, message: str) -> None:
    sample = conversation(("user", "Read"), ("assistant", "1"), ("user", "1"), ("assistant", "2"))
    with pytest.raises(ValueError, match=message) as error:
        tokenize_conversation(
            sample, with_template(processor, template), phase="sft", image_token_counts=[]
        )
    assert str(error.value).startswith("rows.jsonl:3: ")


@pytest.mark.parametrize(
    ("sample", "counts", "message"),
    [
        (
            conversation(("user", "<|image_pad|>"), ("assistant", "1")),
            [],
            "1 image tokens in the text for 0 images",
        ),
        (
            conversation(("user", [PICTURE, Part("text", "a<|image_pad|>")]), ("assistant", "1")),
            [1],
            "2 image tokens in the text for 1 images",
        ),
        (
            conversation(("user", "a<|video_pad|>b"), ("assistant", "1")),
            [],
            r"<\|video_pad\|> in the text",
        ),
        (
            conversation(("user", [PICTURE, Part("text", "a")]), ("assistant", "<|video_pad|>")),
            [1],
            r"<\|video_pad\|> in the text",
        ),
        (conversation(("user", "Read")), [], "no assistant message"),
    ],
)
def test_rows_that_cannot_be_used(
    processor: Processor, sample: Conversation, counts: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tokenize_conversation(sample, processor, phase="sft", image_token_counts=counts)
    assert str(error.value).startswith("rows.jsonl:3: ")


def test_a_prompt_with_a_video_token_is_refused(processor: Processor) -> None:
    sample = conversation(("user", "<|video_pad|>"))
    with pytest.raises(ValueError, match=r"^rows.jsonl:3: <\|video_pad\|> in the text"):
        tokenize_prompt(sample, processor, image_token_counts=[])
