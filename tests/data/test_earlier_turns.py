"""Rows whose earlier turns the chat template renders differently, as models that think have it."""

import dataclasses
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits.tasks import WORDS
from hypothesis import given, settings
from hypothesis import strategies as st
from local_loader import require_alike
from qwen_templates import qwen3
from surveyed import grids_of, settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data.chat_template import habits_of
from loongplug.data.check import index
from loongplug.data.conversation import Conversation, Message
from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import kept_table
from loongplug.data.loader import collate
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import BadSampleError, Sample
from loongplug.data.tokens import Tokens, tokenize_conversation, tokenize_prompt
from loongplug.verify.tiny_processor import write_processor

pytestmark = pytest.mark.quick

EMPTY = "<think>\n\n</think>\n\n"
END = "<|im_end|>"


def write_folder(folder: Path, *, opens: bool, keeps: bool) -> Path:
    write_processor(folder, words=WORDS)
    tokenizer = load_processor(folder).tokenizer
    tokenizer.chat_template = qwen3(opens=opens, keeps=keeps)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("thinks"), opens=False, keeps=False)


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory) -> dict[tuple[bool, bool], Processor]:
    kinds = [(opens, keeps) for opens in (False, True) for keeps in (False, True)]
    made = {
        kind: load_processor(
            write_folder(tmp_path_factory.mktemp("thinks"), opens=kind[0], keeps=kind[1])
        )
        for kind in kinds
    }
    assert all(habits_of(each.tokenizer).renders_again for each in made.values())
    return made


def test_templates_that_only_append_are_known(processor):
    assert not habits_of(processor.tokenizer).renders_again


TEXTS = st.sampled_from(["Read", "the digits.", "31", ""])
OF_ROW = "<think>\n\n</think>\n\n"  # the row's own, of nothing
THOUGHTS = st.sampled_from(["", "", OF_ROW, "<think>\nRead 3\n</think>\n\n", "<think>1</think>"])
ANSWERS = st.builds(
    lambda thought, text, trained: Message("assistant", (thought + text,), trained),
    THOUGHTS,
    TEXTS,
    st.sampled_from([True, True, False]),
)
RESULTS = st.sampled_from(
    [Message("tool", ("13",)), Message("user", ("<tool_response>\n13\n</tool_response>",))]
)
STEPS = st.lists(st.tuples(ANSWERS, RESULTS), max_size=2)
ROUNDS = st.lists(st.tuples(TEXTS, STEPS, ANSWERS), min_size=1, max_size=3)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Message, ...]:
    """Questions with answers, some of which use tools first; perhaps a question at the end."""
    messages = [Message("system", ("Read",))] if draw(st.booleans()) else []
    for question, steps, answer in draw(ROUNDS):
        messages.append(Message("user", (question,)))
        messages += [message for step in steps for message in step]
        messages.append(answer)
    if draw(st.booleans()):
        messages.append(Message("user", ("4 Read",)))
    return tuple(messages)


@dataclasses.dataclass(frozen=True)
class Served:
    """An answer as a server has it, by what transformers renders."""

    number: int
    prompt: list[int]
    text: str  # up to its end
    generated: list[int]  # behind the prompt
    thought: list[int]  # of these, those of a thought that the template puts there
    body: str  # what is left of the answer's text


def render(messages: Sequence[Message], processor: Processor, **options: Any) -> Any:
    inputs = [{"role": each.role, "content": each.text} for each in messages]
    return processor.tokenizer.apply_chat_template(inputs, **{"tokenize": False} | options)


def served(messages: Sequence[Message], processor: Processor) -> list[Served]:
    """Of each answer that is trained on."""

    def ids(text: str) -> list[int]:
        return processor.tokenizer.encode(text, add_special_tokens=False)

    found = []
    for number, message in enumerate(messages):
        if message.role != "assistant" or not message.trained:
            continue
        asked = render(messages[:number], processor, add_generation_prompt=True)
        text = render(messages[: number + 1], processor).removesuffix("\n")
        assert text.startswith(asked)
        generated = text.removeprefix(asked)
        thought = EMPTY.removeprefix("<think>\n" if asked.endswith("<think>\n") else "")
        if "</think>" in message.text:
            thought = ""
        assert generated.startswith(thought)
        found.append(
            Served(
                number,
                ids(asked),
                text,
                ids(thought) + ids(generated.removeprefix(thought)),
                ids(thought),
                generated.removeprefix(thought),
            )
        )
    return found


def least_renderings(answers: Sequence[Served]) -> int:
    """Tried out: the fewest whose texts begin with each of the answers' own."""
    for count in range(1, len(answers) + 1):
        for chosen in combinations(answers, count):
            if all(any(c.text.startswith(a.text) for c in chosen) for a in answers):
                return count
    raise AssertionError


def tokenized(messages: tuple[Message, ...], processor: Processor, **options: Any) -> Tokens:
    processor = dataclasses.replace(processor, **options)
    row = Conversation(messages=messages, where="rows.jsonl:3")
    return tokenize_conversation(row, processor, phase="sft", placeholders=[])


def trained_runs(tokens: Tokens) -> list[tuple[list[int], int]]:
    """Each run of trained tokens: all of its rendering up to its end, and where it begins."""
    runs = []
    ends = np.cumsum(tokens.lengths)[:-1]
    for ids, trained in zip(
        np.split(tokens.ids, ends), np.split(tokens.trained, ends), strict=True
    ):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]])))
        runs += [(ids[:end].tolist(), int(start)) for start, end in edges.reshape(-1, 2)]
    return runs


@settings(max_examples=60)
@given(messages=rows(), opens=st.booleans(), keeps=st.booleans(), thoughts=st.booleans())
def test_each_answer_is_trained_on_as_it_is_served(thinkers, messages, opens, keeps, thoughts):
    processor = thinkers[opens, keeps]
    answers = served(messages, processor)
    options = {"trains_thoughts": thoughts}
    if not answers:
        with pytest.raises(ValueError, match="no answer is trained on"):
            tokenized(messages, processor)
        return
    split = tokenized(messages, processor, multi_turn="split", **options)
    expected = [
        (each.prompt + each.generated, len(each.prompt) + (0 if thoughts else len(each.thought)))
        for each in answers
    ]
    assert sorted(trained_runs(split)) == sorted(expected)
    assert split.answers == len(answers)
    assert len(split.lengths) == least_renderings(answers)
    for each in answers:
        row = Conversation(messages=messages[: each.number], where="")
        assert tokenize_prompt(row, processor, placeholders=[]).tolist() == each.prompt

    last = tokenized(messages, processor, multi_turn="last", **options)
    if len(split.lengths) == 1:
        assert last.ids.tolist() == split.ids.tolist()
        assert last.trained.tolist() == split.trained.tolist()
        return
    whole = render(messages, processor)
    if not whole.startswith(answers[-1].text):
        whole = answers[-1].text + "\n"
    assert len(last.lengths) == 1
    assert processor.tokenizer.decode(last.ids) == whole
    question = max(
        number
        for number, message in enumerate(messages[: answers[-1].number])
        if message.role == "user" and "<tool_response>" not in message.text
    )
    behind = [each for each in answers if each.number > question]
    bodies = [processor.tokenizer.decode(ids[start:]) for ids, start in trained_runs(last)]
    assert last.answers == len(bodies) == len(behind)
    for body, each in zip(bodies, behind, strict=True):
        dropped = EMPTY[len("<think>\n") if opens else 0 :]  # it is shown in the last turn alone
        assert body.removeprefix(dropped) == each.body.removeprefix(dropped)


def test_pretraining_finds_the_answers_that_it_leaves_out(thinkers):
    """Also behind steps whose thoughts of nothing a later question drops."""
    for roles in ("uaua", "uatataua"):
        for left in (at for at, role in enumerate(roles) if role == "a"):
            messages = tuple(
                Message({"u": "user", "a": "assistant", "t": "tool"}[role], (f"3{at}",), at != left)
                for at, role in enumerate(roles)
            )
            row = Conversation(messages=messages, where="")
            for (_, keeps), processor in thinkers.items():
                tokens = tokenize_conversation(row, processor, phase="pretrain", placeholders=[])
                assert processor.tokenizer.decode(tokens.ids) == render(messages, processor)
                gone = processor.tokenizer.decode(tokens.ids[~tokens.trained])
                assert gone.endswith(f"3{left}{END}"), (roles, left, keeps)
                assert gone.removesuffix(f"3{left}{END}") in ("", EMPTY, EMPTY[len("<think>\n") :])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("fields", [{}, {"name": "A"}])
def test_pretraining_loses_no_thought_of_an_earlier_turn(thinkers, trained, fields):
    thought, asked = "<think>\nRead 3\n</think>\n\n", Message("user", ("Read",))
    answer = Message("assistant", (f"{thought}1",), trained, fields)
    row = Conversation(messages=(asked, answer), where="rows.jsonl:3")
    lost = dataclasses.replace(row, messages=(*row.messages, asked, Message("assistant", ("1",))))
    without = dataclasses.replace(answer, parts=("\n\n1",))
    kept = dataclasses.replace(lost, messages=(asked, without, *lost.messages[2:]))
    for processor in thinkers.values():
        tokens = tokenize_conversation(row, processor, phase="pretrain", placeholders=[])
        assert thought in processor.tokenizer.decode(tokens.ids)
        tokenize_conversation(kept, processor, phase="pretrain", placeholders=[])
        with pytest.raises(ValueError, match=r"^rows.jsonl:3: .* lost .* sft .* split, or drop"):
            tokenize_conversation(lost, processor, phase="pretrain", placeholders=[])
        tokenized(lost.messages, processor, multi_turn="split")


CHAT = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "0"}],
    },
    {"role": "assistant", "content": "31"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "1"}, {"type": "image", "image": "b.png"}],
    },
    {"role": "assistant", "content": "<think>3</think>13"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "1"},
]
PLAIN = [{"role": "user", "content": "Read"}, {"role": "assistant", "content": "1"}]


@pytest.fixture
def path(tmp_path, write_image) -> Path:
    """Rows of three renderings with images again and again, of two, and of one."""
    write_image("a.png", height=32, width=64, seed=1)
    write_image("b.png", height=64, width=32, seed=2)
    rows = [CHAT, PLAIN, CHAT[2:], [*PLAIN, *CHAT[2:4]], CHAT[:2], *([PLAIN] * 3), CHAT[:4]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def dataset_of(path: Path, folder: Path, *, seq_length: int = 128, **options: Any) -> ChatDataset:
    return ChatDataset(
        path,
        processor=load_processor(folder, **{"multi_turn": "split"} | options),
        seq_length=seq_length,
        training_phase="sft",
    )


def test_a_row_s_renderings_are_packed_as_rows_of_their_own_would_be(path, folder):
    """And what a pack computes is held against separate samples by models/test_packed_step.py."""
    split = dataset_of(path, folder)[0]
    beginnings = path.with_name("beginnings.jsonl")
    with beginnings.open("w") as file:
        for end in (2, 4, 6):
            row = [
                {**turn, "loss": number == end - 1} if turn["role"] == "assistant" else turn
                for number, turn in enumerate(CHAT[:end])
            ]
            file.write(json.dumps({"messages": row}) + "\n")
    alone = dataset_of(beginnings, folder, multi_turn="last")
    apart = [alone[number] for number in range(3)]
    assert [len(grids_of(sample)) for sample in apart] == [1, 2, 2]
    assert split.extent.lengths == tuple(map(len, apart))
    assert len(split) == sum(split.extent.lengths)

    def packed(samples: list[Sample]) -> Any:
        ids = {"image_encoder": (alone.processor.token_ids["image_token_id"],)}
        return collate(samples, pad_token_id=0, seq_length=128, packed=True, token_ids=ids)[0]

    found, expected = packed([split]), packed(apart)
    require_alike(found, expected, media=False)
    assert found.segments == split.extent.lengths
    assert found.lengths == expected.lengths
    (places,), (others,) = (each.units["image_encoder"].places for each in (found, expected))
    assert places.tolist() == others.tolist()
    assert grids_of(split) == tuple(grid for sample in apart for grid in grids_of(sample))


def test_an_index_has_the_extents_of_all_renderings(path, folder):
    dataset = dataset_of(path, folder)
    rows = JsonlIndex(path)
    given = settings_of(folder)
    index([str(path)], given, processes=1)
    samples = [dataset[number] for number in range(len(rows))]
    table = kept_table(rows, given)
    assert table is not None
    assert [table.row(number) for number in range(len(rows))] == [x.extent for x in samples]
    assert [len(sample.extent.lengths) for sample in samples] == [3, 1, 2, 2, 1, 1, 1, 1, 2]
    assert table.answers.sum() == 3 + 1 + 2 + 2 + 1 + 3 + 2
    assert table.trained.tolist() == [sample.loss_mask.sum() for sample in samples]
    last = dataclasses.replace(given, multi_turn="last")
    with pytest.raises(ValueError, match=r"multi_turn was split, is last.*--multi-turn last"):
        kept_table(rows, last)
    # Where turns differ, each rule has an index; else one holds for both.
    index([str(path)], last, processes=1)
    for rule in (given, last):
        assert kept_table(rows, rule) is not None
    single = path.with_name("single.jsonl")
    single.write_text(path.read_text().splitlines()[1] + "\n")
    index([str(single)], last, processes=1)
    assert kept_table(JsonlIndex(single), given) is not None


def test_a_row_is_as_long_as_its_renderings_together(path, folder):
    length = len(dataset_of(path, folder)[0])
    said = rf"rows.jsonl:1: .* {length} tokens in 3 .*-turn last"
    with pytest.raises(BadSampleError, match=said):
        dataset_of(path, folder, seq_length=length - 1)[0]
    assert len(dataset_of(path, folder, multi_turn="last")[0]) < length / 2


def test_inspection_shows_renderings_and_what_is_trained(path, folder):
    def shown(*options: str) -> list[str]:
        command = ("data", "inspect", str(path), "--tokenizer-model", str(folder), "--samples", "1")
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0
        return result.stdout.splitlines()

    def trained(lines: list[str]) -> list[str]:
        return [line.split(maxsplit=2)[2] for line in lines if line.startswith("+")]

    split = shown("--multi-turn", "split")
    assert sum("another rendering" in line for line in split) == 2
    thought = r"<think>\n3\n</think>\n\n"
    assert trained(split) == [f"31{END}", f"{thought}13{END}", f"1{END}"]
    assert trained(shown()) == [f"1{END}"]
    empty = r"<think>\n\n</think>\n\n"
    flags = ("--multi-turn", "split", "--train-template-thought")
    assert trained(shown(*flags)) == [f"{empty}31{END}", f"{thought}13{END}", f"{empty}1{END}"]
