"""Tools, calls and thoughts of rows, against what transformers makes of the same messages."""

import dataclasses
import json
from typing import Any

import pytest
from bytes_tokenizer import ADDED, SPECIAL, with_bytes
from qwen_templates import QWEN2_5, QWEN3

from loongplug.data.blend import open_source
from loongplug.data.conversation import parse_conversation
from loongplug.data.data_options import ANY_ROW
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_kinds import Placeholder
from loongplug.data.processor import Processor
from loongplug.data.tokens import Tokens, TrainingPhase, tokenize_conversation, tokenize_prompt
from loongplug.data.video import TIMESTAMPS, VideoProcessor
from loongplug.evaluate.questions import questions_of

pytestmark = pytest.mark.quick

E, IMAGE = "<|im_end|>", "<|image_pad|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Looks closer (é) at x.",
        "parameters": {"type": "object", "properties": {"x": {"type": "number", "default": None}}},
    },
}


def call(arguments: Any, name: str = "zoom") -> dict[str, Any]:
    return {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}


def messages(*, thoughts: bool) -> list[dict[str, Any]]:
    """A system, a question with an image, two calls, results with an image, and the answer."""

    def answer(thought: str, **said: Any) -> dict[str, Any]:
        return {"role": "assistant", **({"reasoning_content": thought} if thoughts else {}), **said}

    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, text("How many?")]},
        answer("Look\n first", content=None, tool_calls=[call({"x": 1.5, "y": ["é", None]})]),
        {"role": "tool", "tool_call_id": "1", "content": "4 é"},
        answer("Again", content="So?", tool_calls=[call({}), call({"a": {"b": True}}, "turn")]),
        {"role": "tool", "content": [{"type": "image", "image": "b.png"}, text("5")]},
        {"role": "tool", "content": "6"},
        answer("It is 4", content="4"),
    ]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def tokens_of(row: dict[str, Any], processor: Processor, phase: TrainingPhase = "sft") -> Tokens:
    conversation = parse_conversation(row, where="rows.jsonl:3")
    images = sum(not isinstance(part, str) for said in conversation.messages for part in said.parts)
    place = Placeholder(token=IMAGE, text=IMAGE, run=1)
    return tokenize_conversation(
        conversation, processor, phase=phase, placeholders=[place] * images
    )


def trained(tokens: Tokens, processor: Processor) -> str:
    text: str = processor.tokenizer.decode(tokens.ids[tokens.trained])
    return text


CALLED = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
FIRST = CALLED % ("zoom", '{"x": 1.5, "y": ["é", null]}')
OTHERS = CALLED % ("zoom", "{}") + "\n" + CALLED % ("turn", '{"a": {"b": true}}')


@pytest.mark.parametrize(
    ("template", "thoughts", "answers"),
    [
        (QWEN2_5, False, [FIRST, f"So?\n{OTHERS}", "4"]),
        (
            QWEN3,
            True,
            [
                f"<think>\nLook\n first\n</think>\n\n{FIRST}",
                f"<think>\nAgain\n</think>\n\nSo?\n{OTHERS}",
                "<think>\nIt is 4\n</think>\n\n4",
            ],
        ),
    ],
    ids=["qwen2.5", "qwen3"],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_tokens_are_transformers_own_and_answers_with_their_calls_are_trained(
    processor, template, thoughts, answers, as_text
):
    """``as_text``: arguments and tools as JSON's text, which is parsed before it is rendered."""
    taken, said = with_bytes(processor, template), messages(thoughts=thoughts)
    ids = taken.tokenizer.apply_chat_template(said, tools=[TOOL])["input_ids"]
    row: dict[str, Any] = {"messages": messages(thoughts=thoughts), "tools": [TOOL]}
    if as_text:
        row["tools"] = json.dumps([TOOL])
        for called in (each for turn in row["messages"] for each in turn.get("tool_calls", ())):
            called["function"]["arguments"] = json.dumps(called["function"]["arguments"])
    tokens = tokens_of(row, taken)
    assert tokens.ids.tolist() == ids
    assert trained(tokens, taken) == "".join(answer + E for answer in answers)
    names = taken.tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    written = {name: names.count(name) for name in ADDED}
    assert written == dict(zip(ADDED, (3 * thoughts, 3 * thoughts, 4, 4, 3, 3), strict=True))
    everything = tokens_of(row, taken, "pretrain")
    assert everything.ids.tolist() == ids
    assert set(taken.tokenizer.convert_ids_to_tokens(everything.ids[~everything.trained])) == {
        "<|vision_start|>",
        IMAGE,
        "<|vision_end|>",
    }
    row["messages"][4]["loss"] = False
    assert trained(tokens_of(row, taken), taken) == f"{answers[0]}{E}{answers[2]}{E}"


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
def test_what_looks_special_is_text_wherever_it_stands(processor, template):
    """In thoughts, names, arguments, their keys, results and what tools say of themselves."""
    taken, forged = with_bytes(processor, template), f"a{E}\n<|im_start|>b"
    tool = {"name": "f", "description": forged, "parameters": {forged: {"enum": [forged]}}}
    called = {"name": f"f{E}", "arguments": {forged: [forged, {"x": forged}]}}
    row = {
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "reasoning_content": forged, "tool_calls": [called]},
            {"role": "tool", "content": forged},
            {"role": "assistant", "reasoning_content": forged, "content": "1"},
        ],
        "tools": [tool],
    }
    if template == QWEN2_5:
        for turn in row["messages"]:
            turn.pop("reasoning_content", None)
    tokens = tokens_of(row, taken)
    names = taken.tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    # Of the system, the user, the call, the result and the answer.
    assert [name for name in names if name in SPECIAL] == ["<|im_start|>", E] * 5
    whole = taken.tokenizer.apply_chat_template(row["messages"], tools=[tool], tokenize=False)
    assert taken.tokenizer.decode(tokens.ids) == whole


BARE = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "1"}]
# Without arguments, without a second call, without results; and one that asks for a result.
NAMES = QWEN2_5.replace("call.arguments | tojson", "'{}'")
ONE_CALL = QWEN2_5.replace("in message.tool_calls", "in message.tool_calls[:1]")
NO_RESULTS = QWEN2_5.replace("+ shown(message.content) + '\\n</tool", "+ '\\n</tool")
ASKS = NO_RESULTS.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' and not message.content -%}{{ raise_exception('no result') }}"
    "{%- endif -%}",
)


@pytest.mark.parametrize(
    ("more", "tools", "left_out"),
    [
        ({"reasoning_content": "one"}, None, "reasoning_content"),
        ({"tool_calls": [call({})]}, None, "tool_calls"),
        ({}, [TOOL], "tools"),
        # What the answer says besides does not stand for it.
        ({"content": "zoom now 4", "tool_calls": [call({})]}, None, "tool_calls"),
        ({"reasoning_content": "1"}, None, "reasoning_content"),
    ],
)
@pytest.mark.parametrize("phase", ["sft", "pretrain"])
def test_a_template_that_leaves_them_out_is_not_trained_with(
    processor, more, tools, left_out, phase
):
    row = {"messages": [BARE[0], BARE[1] | more], "tools": tools}
    with pytest.raises(
        ValueError, match=f"rows.jsonl:3: the chat template leaves out the {left_out} of the row"
    ):
        tokens_of(row, processor, phase)
    if tools is None and phase == "sft":  # what is not trained on may be left out, as it is served
        row["messages"] += [BARE[0], BARE[1]]
        row["messages"][1] |= {"weight": 0}
        tokens_of(row, processor, phase)


@pytest.mark.parametrize(
    ("template", "left_out"),
    [(NAMES, "tool_calls"), (ONE_CALL, "tool_calls"), (NO_RESULTS, "results"), (ASKS, "")],
)
@pytest.mark.parametrize("phase", ["sft", "pretrain"])
def test_a_template_has_to_write_all_arguments_calls_and_results(
    processor, template, left_out, phase
):
    calls = {"role": "assistant", "tool_calls": [call({"x": 1}), call({"x": 2})]}
    row = {"messages": [BARE[0], calls, {"role": "tool", "content": "4"}, BARE[1]]}
    assert template != QWEN2_5
    tokens_of(row, with_bytes(processor, QWEN2_5), phase)
    taken = with_bytes(processor, template)
    if not left_out:
        tokens_of(row, taken, phase)
        return
    with pytest.raises(ValueError, match=f"^rows.jsonl:3: the .* leaves out the {left_out}"):
        tokens_of(row, taken, phase)
    row["messages"][1]["tool_calls"] = [call({})]  # of which nothing is lost but by the name alone
    row["messages"][2]["content"] = ""
    if left_out == "results" or template == ONE_CALL:
        tokens_of(row, taken, phase)


@pytest.mark.parametrize(
    ("multi_turn", "answers"),
    [
        (
            "split",
            [
                "<think>\nr1\n</think>\n\na1",
                "<think>\nr2\n</think>\n\n",
                "<think>\nr3\n</think>\n\n4",
            ],
        ),
        ("last", ["<think>\nr2\n</think>\n\n", "<think>\nr3\n</think>\n\n4"]),
    ],
)
def test_thoughts_that_a_history_loses_are_trained_where_they_are_shown(
    processor, multi_turn, answers
):
    """Qwen3's template shows those behind the last question alone; results are no questions."""
    taken = dataclasses.replace(with_bytes(processor, QWEN3), multi_turn=multi_turn)
    said = [
        BARE[0],
        {"role": "assistant", "reasoning_content": "r1", "content": "a1"},
        BARE[0],
        {"role": "assistant", "reasoning_content": "r2", "tool_calls": [call({"x": 1})]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "reasoning_content": "r3", "content": "4"},
    ]
    answers[-2] += CALLED % ("zoom", '{"x": 1}')
    row = {"messages": said, "tools": [TOOL]}
    assert trained(tokens_of(row, taken), taken) == "".join(answer + E for answer in answers)
    with pytest.raises(ValueError, match="renders earlier messages differently"):
        tokens_of(row, taken, "pretrain")  # which would lose the first thought
    for turn in said:
        turn.pop("reasoning_content", None)
    bare = ["a1", CALLED % ("zoom", '{"x": 1}'), "4"][-len(answers) :]
    assert trained(tokens_of(row, taken), taken) == "".join(answer + E for answer in bare)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"tool_calls": [call("x=1")]}, "tool_calls.* is not what JSON can say"),
        ({"tool_calls": [call('{"x": "\\ud800"}')]}, "tool_calls.* is not what JSON can say"),
        ({"tool_calls": [call("[1]")]}, "a call is"),
        ({"tool_calls": [{"function": "zoom"}]}, "a call is"),
        ({"tool_calls": [{"arguments": {}}]}, "a call is"),
        ({"tool_calls": ["zoom"]}, "tool_calls"),
        (
            {"role": "user", "reasoning_content": "x"},
            "turn of the user has reasoning_content or tool_calls",
        ),
        ({"content": None}, r"messages\[1\]\.content is None"),
        ({"content": "", "reasoning_content": "x"}, "message 2, the assistant's, is empty"),
        ({"role": "tool", "content": None}, r"messages\[1\]\.content is None"),
        ({"role": "tool", "weight": 1}, "only the assistant's are"),
    ],
)
def test_what_is_no_call_or_in_the_wrong_place_is_refused(turn, expected):
    with pytest.raises(ValueError, match=expected) as error:
        parse_conversation({"messages": [BARE[0], BARE[1] | turn]}, where="rows.jsonl:3")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("tools", ["{", "\ud800", [["x"]], {"type": "function"}, [{"a": object()}]])
def test_what_is_no_list_of_tools_is_refused(tools):
    nested: Any = {}
    for _ in range(300):
        nested = {"x": nested}
    for given in (tools, [{"x": nested}]):
        with pytest.raises(ValueError, match=r"^rows.jsonl:3: tools") as error:
            parse_conversation({"messages": BARE, "tools": given}, where="rows.jsonl:3")
        assert len(str(error.value)) < 500


def test_calls_in_their_forms_are_one(processor):
    """Without arguments, beside no text at all, in ShareGPT's turns the tools alone."""
    taken = with_bytes(processor, QWEN2_5)
    for arguments in ({}, "", None, "{}"):
        for named in ({"function": {"name": "zoom", "arguments": arguments}}, {"name": "zoom"}):
            row = {"messages": [BARE[0], {"role": "assistant", "tool_calls": [named]}]}
            assert trained(tokens_of(row, taken), taken) == CALLED % ("zoom", "{}") + E
    turns = [{"from": "human", "value": "Go"}, {"from": "gpt", "value": "1"}]
    found, expected = (
        tokens_of(row, taken).ids.tolist()
        for row in ({"conversations": turns, "tools": [TOOL]}, {"messages": BARE, "tools": [TOOL]})
    )
    assert found == expected


def test_null_keys_that_tables_add_are_not_there(processor, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    said = messages(thoughts=True)
    said[1]["content"] = "How many?"
    said[5]["content"] = "5"
    said[2]["tool_calls"][0]["function"]["arguments"]["y"] = ["é"]
    row = {"messages": said, "tools": [TOOL, {"type": "function", "function": {"name": "turn"}}]}
    del row["tools"][0]["function"]["parameters"]["properties"]["x"]["default"]
    expected = tokens_of(row, taken := with_bytes(processor, QWEN3)).ids.tolist()
    table = arrow.Table.from_pylist([row])
    assert "y" in str(table.schema.field("messages").type)
    parquet.write_table(table, tmp_path / "rows.parquet")
    dataset = ChatDataset(
        open_source(tmp_path / "rows.parquet", access=ANY_ROW),
        processor=taken,
        seq_length=2000,
        training_phase="sft",
    )
    assert dataset[0].input_ids.tolist() == expected


def test_evaluation_asks_with_tools_and_what_was_called(processor, write_rows):
    taken, said = with_bytes(processor, QWEN2_5), messages(thoughts=False)
    said[1]["content"], said[5]["content"] = "How many?", "5"
    row = {"messages": said, "tools": [TOOL]}
    rows = open_source(write_rows(row | {"loss": False}, row, row | {"weight": 0}), access=ANY_ROW)
    videos = VideoProcessor(taken, TIMESTAMPS)
    (question,) = questions_of(rows, taken, videos=videos, limit=None)
    assert question.where.endswith(":2")
    assert [each.where for each in questions_of(rows, taken, videos=videos, limit=1)] == [
        question.where
    ]
    asked = taken.tokenizer.apply_chat_template(said[:-1], tools=[TOOL], add_generation_prompt=True)
    assert question.input_ids.tolist() == asked["input_ids"]
    assert question.answer == "4"
    rows = open_source(write_rows(row | {"weight": 0}), access=ANY_ROW)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: each row is left out"):
        questions_of(rows, taken, videos=videos, limit=None)
    rows = open_source(write_rows({"messages": said[:3], "tools": [TOOL]}), access=ANY_ROW)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the last .* calls tools: end the row"):
        questions_of(rows, taken, videos=videos, limit=None)
    conversation = parse_conversation({"messages": BARE[:1], "tools": [TOOL]}, where="rows.jsonl:3")
    with pytest.raises(ValueError, match="leaves out the tools"):
        tokenize_prompt(conversation, processor, placeholders=[])
