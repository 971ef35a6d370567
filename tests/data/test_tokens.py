"""Tokens and what is trained on, against samples labelled by hand."""

import copy
import dataclasses

import pytest
from conversations import conversation, marked

from loongplug.data.conversation import Conversation, MediaPart
from loongplug.data.folder_files import QWEN_VISION_TOKENS
from loongplug.data.media_kinds import Placeholder
from loongplug.data.processor import Processor
from loongplug.data.tokens import (
    Tokens,
    tokenize_conversation,
    tokenize_prompt,
)

pytestmark = pytest.mark.quick


def images(runs: list[int]) -> list[Placeholder]:
    token = QWEN_VISION_TOKENS["image_token_id"]
    return [Placeholder(token=token, text=token, run=run) for run in runs]


PICTURE = MediaPart("image", "a.png")
VIDEO = MediaPart("video", ("1.png", "2.png"), fps=2.0)
TIMED = Placeholder(  # two pictures of two tokens, each behind its time
    token=QWEN_VISION_TOKENS["video_token_id"],
    text="".join(
        f"<{seconds} seconds><|vision_start|><|video_pad|><|vision_end|>" for seconds in (0.5, 1.5)
    ),
    run=2,
)
BLOCK = Placeholder(
    token=QWEN_VISION_TOKENS["video_token_id"], text=QWEN_VISION_TOKENS["video_token_id"], run=4
)
ONE_TURN = conversation(("user", [PICTURE, PICTURE, "Read the digits."]), ("assistant", "31"))
TWO_TURNS = conversation(
    ("system", "How are: 2"),
    ("user", ["Read", PICTURE]),
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
    ],
)
def test_tokens_and_labels_as_by_hand(processor, sample, phase, counts, expected):
    tokens = tokenize_conversation(sample, processor, phase=phase, placeholders=images(counts))
    assert marked(tokens, processor) == expected


MIXED = conversation(("user", ["Read", VIDEO, PICTURE, VIDEO, "+"]), ("assistant", "31"))
IMAGE_TEXT = "<|vision_start|> <|image_pad|> <|vision_end|>"


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (
            "pretrain",
            f"[{S}] [user] [NL] [Read] <|vision_start|> [<] [0] [.] [5] [▁seconds] [>]"
            " <|vision_start|> <|video_pad|> <|video_pad|> <|vision_end|>"
            " [<] [1] [.] [5] [▁seconds] [>]"
            " <|vision_start|> <|video_pad|> <|video_pad|> <|vision_end|>"
            f" <|vision_end|> {IMAGE_TEXT} <|vision_start|>"
            f" <|video_pad|> <|video_pad|> <|video_pad|> <|video_pad|> <|vision_end|> [+] [{E}]"
            f" [NL] [{S}] [assistant] [NL] [3] [1] [{E}] [NL]",
        ),
    ],
)
def test_videos_with_timestamps_and_as_a_block(processor, phase, expected):
    placeholders = [TIMED, *images([1]), BLOCK]
    tokens = tokenize_conversation(MIXED, processor, phase=phase, placeholders=placeholders)
    assert marked(tokens, processor) == expected
    question = Conversation(messages=MIXED.messages[:1], where="rows.jsonl:3")
    prompt = tokenize_prompt(question, processor, placeholders=placeholders)
    assert prompt.tolist() == tokens.ids[: len(prompt)].tolist()


def test_a_template_that_reorders_is_refused(processor):
    reordering = with_template(
        processor,
        for_each_message(
            "{% for kind in ('image', 'video') if message.content is not string %}"
            "{% for part in message.content if part.type == kind %}<|{{ kind }}_pad|>{% endfor %}"
            "{% endfor %}"
        ),
    )
    with pytest.raises(ValueError, match=r"^rows.jsonl:3: .* in another order than the row"):
        tokenize_conversation(
            conversation(("user", [VIDEO, PICTURE])),
            reordering,
            phase="pretrain",
            placeholders=[BLOCK, *images([1])],
        )


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
            for_each_message("{{ message.content }}<|endoftext|>"),
            "the chat template .* does not end an answer with the tokenizer's eos_token",
        ),
        (
            for_each_message("{{ message.content if loop.last else 'x' }}<|im_end|>"),
            "the chat template renders earlier messages differently",
        ),
        ("{{ 1 + 'a' }}", r"the chat template fails on this row \(TypeError: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r".* fails on this row \(RecursionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r".* fails on this row \(Recursion"),
        ("{{ messages.__class__.__mro__ }}", r".* refuses this row: access to attribute '__class_"),
        ("{{ raise_exception('a' * 1000) }}", r"the chat template refuses this row: a{300}\.$"),
        ("x" * (2**17 + 1), r".* refuses this row: it is longer than 131,072 characters\.$"),
    ],
    ids=["no-end", "changes", "type", "nested", "recursive", "unsafe", "raises", "long"],
)
def test_templates_that_cannot_be_used(processor, template, message):
    sample = conversation(("user", "Read"), ("assistant", "1"), ("user", "1"), ("assistant", "2"))
    taken = with_template(processor, template)
    with pytest.raises(ValueError, match=f"^rows.jsonl:3: {message}") as error:
        tokenize_conversation(sample, taken, phase="sft", placeholders=images([]))
    assert "--packing" not in str(error.value)  # where it does not help


@pytest.mark.parametrize(
    ("sample", "counts", "message"),
    [
        (
            conversation(("user", "<|image_pad|>"), ("assistant", "1")),
            [],
            "1 image tokens in the text for 0 images",
        ),
        (
            conversation(("user", [PICTURE, "a<|image_pad|>"]), ("assistant", "1")),
            [1],
            "2 image tokens in the text for 1 images",
        ),
        (conversation(("user", "Read")), [], "no assistant message"),
    ],
)
def test_rows_that_cannot_be_used_where_special_tokens_may_stand_in_text(
    processor, sample, counts, message
):
    allowing = dataclasses.replace(processor, special_texts=None)
    with pytest.raises(ValueError, match=message) as error:
        tokenize_conversation(sample, allowing, phase="sft", placeholders=images(counts))
    assert str(error.value).startswith("rows.jsonl:3: ")


def test_what_a_tokenizers_file_says_of_padding_and_length_plays_no_part(processor):
    expected = tokenize_conversation(TWO_TURNS, processor, phase="sft", placeholders=images([1]))
    other = copy.deepcopy(processor)
    other.tokenizer.backend_tokenizer.enable_padding(length=50)
    other.tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    found = tokenize_conversation(TWO_TURNS, other, phase="sft", placeholders=images([1]))
    assert found.ids.tolist() == expected.ids.tolist()


def left_out(*numbers: int) -> Conversation:
    messages = tuple(
        dataclasses.replace(message, trained=number not in numbers)
        for number, message in enumerate(TWO_TURNS.messages)
    )
    return dataclasses.replace(TWO_TURNS, messages=messages)


@pytest.mark.parametrize("phase", ["sft", "pretrain"])
def test_an_answer_that_is_left_out_is_read_and_not_trained_on(processor, phase):
    def tokens(sample: Conversation) -> Tokens:
        return tokenize_conversation(sample, processor, phase=phase, placeholders=images([1]))

    whole, found = tokens(TWO_TURNS), tokens(left_out(2))
    assert found.ids.tolist() == whole.ids.tolist()
    gone = whole.trained & ~found.trained
    names = processor.tokenizer.convert_ids_to_tokens(whole.ids[gone].tolist())
    assert names == ["3", "1", E]
    assert not (found.trained & ~whole.trained).any()


def test_a_row_that_leaves_out_all_answers_has_nothing_to_train_on(processor):
    with pytest.raises(ValueError, match=r"rows.jsonl:3: no answer is trained on"):
        tokenize_conversation(left_out(2, 4), processor, phase="sft", placeholders=images([1]))


def test_what_pretraining_cannot_leave_out_is_refused(processor):
    with pytest.raises(ValueError, match="can leave out answers alone: drop them from the other"):
        tokenize_conversation(left_out(1), processor, phase="pretrain", placeholders=images([1]))
    tokenize_conversation(left_out(1), processor, phase="sft", placeholders=images([1]))
