"""Keys of rows: each is used, refused by name, or counted and named once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from surveyed import settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data import schemas
from loongplug.data.bad_samples import BadSamples, Remarks
from loongplug.data.blend import open_source
from loongplug.data.conversation import MediaPart, parse_conversation
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import kept_table
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import MASKED, BadSample
from loongplug.data.schema_errors import MEANINGS

pytestmark = pytest.mark.quick

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "yes"}


def message(**part: Any) -> dict[str, Any]:
    said = [{"type": "text", "text": "x"}, part]
    return {"messages": [{"role": "user", "content": said}, {**ANSWER}]}


# Of each place where keys may be: a row, the way to the place, and a value for each of its keys.
FILES = {
    "image": "i.png",
    "images": ["j.png"],
    "video": "v.mp4",
    "videos": [["0.png", "1.png"]],
    "audio": "a.wav",
    "audios": ["b.wav"],
    "fps": 2.0,
}
MARKERS = "<image><image><video><video><audio><audio>"
MASKS = {"loss": False, "weight": 0}
BESIDE = {**FILES, **MASKS, "task": "read", "kind": "scan"}
PAIRS = {"history": [["Hello", "Hi"]]}
SYSTEM = {"system": "Be brief.", "tools": [{"name": "zoom"}]}
ANSWERS = {"reasoning_content": "So.", "tool_calls": [{"name": "zoom"}], "name": "A"}
PART, RATE = ("messages", 0, "content", 1), {"fps": 3.0}
PLACES: dict[Any, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    schemas.MessagesRow: (
        {"messages": [USER | {"content": MARKERS}, ANSWER]},
        (),
        {"messages": [USER | {"content": f"{MARKERS}!"}], **SYSTEM, **BESIDE},
    ),
    schemas.ConversationsRow: (
        {"conversations": [{"from": "human", "value": MARKERS}, {"from": "gpt", "value": "y"}]},
        (),
        {
            "conversations": [{"from": "human", "value": f"{MARKERS}!"}],
            **SYSTEM,
            **BESIDE,
        },
    ),
    schemas.AlpacaRow: (
        {"instruction": MARKERS, "output": "yes"},
        (),
        {"instruction": f"{MARKERS}!", "input": "x", "output": "no", **PAIRS, **SYSTEM, **BESIDE},
    ),
    schemas.QueryRow: (
        {"query": MARKERS, "response": "yes"},
        (),
        {"query": f"{MARKERS}!", "response": "no", **PAIRS, **SYSTEM, **BESIDE},
    ),
    schemas.TextRow: ({"text": MARKERS}, (), {"text": f"{MARKERS}!", **BESIDE}),
    schemas.MessageRow: (
        {"messages": [USER, {**ANSWER}]},
        ("messages", 1),
        {"role": "user", "content": "no", "tool_call_id": "7", **ANSWERS, **MASKS},
    ),
    schemas.ChatTurn: (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        ("conversations", 1),
        {"from": "human", "value": "no", **MASKS},
    ),
    schemas.TextPart: (message(type="text", text="y"), PART, {"text": "no"}),
    schemas.ImagePartRow: (message(type="image", image="i"), PART, {"image": "j"}),
    schemas.ImageUrlPart: (message(type="image_url", image_url="i"), PART, {"image_url": "j"}),
    schemas.VideoPartRow: (message(type="video", video="v"), PART, {"video": "w", **RATE}),
    schemas.VideoUrlPart: (
        message(type="video_url", video_url="v"),
        PART,
        {"video_url": "w", **RATE},
    ),
    schemas.AudioPartRow: (message(type="audio", audio="a"), PART, {"audio": "b"}),
    schemas.AudioUrlPart: (message(type="audio_url", audio_url="a"), PART, {"audio_url": "b"}),
    schemas.Url: (
        message(type="image_url", image_url={"url": "u"}),
        (*PART, "image_url"),
        {"url": "w"},
    ),
}
WITHOUT_MEANING = ("id", "name", "timestamp", "detail")


def keys_of(schema: Any) -> set[str]:
    return {field.alias or name for name, field in schema.model_fields.items()}


def with_keys(schema: type, **keys: Any) -> dict[str, Any]:
    row, way, _ = PLACES[schema]
    row = json.loads(json.dumps(row))
    place = row
    for step in way:
        place = place[step]
    place |= keys
    return row


@pytest.mark.parametrize("schema", PLACES)
def test_every_key_of_every_format_is_used_and_documented(schema):
    """With another value of it, the row says something else; and the page's table has it."""
    beside = FILES if schema.is_row else {}
    before = parse_conversation(with_keys(schema, **beside), where="r:1")
    assert not before.remarks
    examples = PLACES[schema][2]
    table = DOCS.read_text().split("## Keys of a row")[1].split("\n## ")[0]
    assert keys_of(schema) - {"type"} == examples.keys()
    assert keys_of(schema) <= set(re.findall(r"`(\w+)`", table))
    for key in beside:  # each has its marker
        row = with_keys(schema, **{name: each for name, each in beside.items() if name != key})
        with pytest.raises(ValueError, match=r"2 <\w+> markers in the text for 1|no \"fps\""):
            parse_conversation(row, where="r:1")
    for key in examples.keys() - beside.keys() - {"task", "kind"}:  # which are of `loongplug eval`
        row = with_keys(schema, **{**beside, key: examples[key]})
        assert parse_conversation(row, where="r:1") != before, key


@settings(max_examples=50)
@given(
    schema=st.sampled_from([s for s in PLACES if not PLACES[s][0].keys() & keys_of(s)]),
    key=st.one_of(
        st.sampled_from(["loss", "weight", "mask", "path", "url", "tools", "parts", "image", "0"]),
        st.text(min_size=1, max_size=20),
    ),
    value=st.one_of(st.booleans(), st.integers(), st.just("x")),
)
def test_any_unknown_key_of_a_turn_or_part_is_refused_by_name(schema, key, value):
    _, way, _ = PLACES[schema]
    row = with_keys(schema, **{key: value})
    assume(key not in keys_of(schema) and MEANINGS.get(key) != "")
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in way)[1:]
    shown = key.encode(errors="backslashreplace").decode()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_conversation(row, where="r:1")
    assert str(caught.value).startswith(f"r:1: {path} has the key {shown!r:.80} (LoongPlug knows ")
    ignoring = parse_conversation(row, where="r:1", ignored=[key])
    assert ignoring.remarks == (("key", key),)
    for nothing in (None, "", [], {}):
        assert parse_conversation(with_keys(schema, **{key: nothing}), where="r:1").remarks == ()


def test_a_message_s_name_is_the_template_s_where_it_is_text_else_counted():
    for name, fields, remarks in (("A", {"name": "A"}, ()), (5, {}, (("key", "name"),))):
        row = {"messages": [USER | {"name": name}, ANSWER]}
        found = parse_conversation(row, where="r:1")
        assert (found.messages[0].fields, found.remarks) == (fields, remarks)


@pytest.mark.parametrize("schema", PLACES)
def test_keys_without_meaning_are_counted_anywhere(schema):
    row = with_keys(schema, **dict.fromkeys(WITHOUT_MEANING, "x"))
    if schema.is_row:
        row |= FILES | {"anything": 3}
    expected = {("key", key) for key in {*WITHOUT_MEANING} - keys_of(schema)} | {
        ("key", "anything")
    } & {("key", key) for key in row}
    assert set(parse_conversation(row, where="r:1").remarks) == expected


@pytest.mark.parametrize("beside", ["messages", "text"])
def test_one_medium_or_a_list_stands_beside_messages_and_text(beside):
    text = "<image>What?<video><audio>"
    row: dict[str, Any] = {"text": text}
    if beside == "messages":
        row = {"messages": [USER | {"content": text}, ANSWER]}
    dictionary = {"path": "i.png", "bytes": None}  # as datasets writes an image
    for image in ("i.png", ["i.png"], dictionary, [dictionary]):
        whole = row | {"image": image, "video": "v.mp4", "audio": ["a.wav"]}
        said = parse_conversation(whole, where="r:1").messages[0].parts
        assert said == (
            MediaPart("image", "i.png"),
            "What?",
            MediaPart("video", "v.mp4", None),
            MediaPart("audio", "a.wav"),
        )
    with pytest.raises(ValueError, match="1 <video> markers in the text for 2 videos"):
        parse_conversation(whole | {"video": ["v.mp4", "w.mp4"]}, where="r:1")
    part = {"type": "image", "image": dictionary}
    row = {"messages": [USER | {"content": [part]}, ANSWER]}
    assert parse_conversation(row, where="r:1").messages[0].parts == (MediaPart("image", "i.png"),)


def test_no_message_about_a_row_is_long():
    words = BadSample("row", f"r:1: {'word ' * 1000}: mend it.").message
    assert len(words) <= 500
    assert (words[:5], words[-10:]) == ("r:1: ", ": mend it.")


def test_remarks_are_told_once_and_bounded():
    remarks = Remarks()
    for number in range(3):
        remarks.add([("key", "id"), ("mark", "<image>")], where=f"r:{number}")
    remarks.add([MASKED], where="r:9")
    keys, mark = remarks.news()  # how many there will be is not known
    assert keys == "keys without a use (the first at r:0): 'id'"
    assert mark.startswith("<image> as text, the first at r:0: no medium")
    keys, mark, masked = remarks.totals()
    assert keys == "keys without a use (rows that have them): 'id' (3)"
    assert mark.startswith("<image> as text in 3 rows, the first at r:0: ")
    assert masked == "1 rows left out by loss or weight, the first at r:9"
    remarks.add([("key", "id"), MASKED], where="r:10")
    assert remarks.news() == []
    remarks.add([("key", f"k{number}") for number in range(5000)], where="r:11")
    (line,) = remarks.news()
    assert len(line) < 500
    assert len(remarks.found) < 1100
    remarks.add([("video", "odd stamps")], where="r:12: video a.mp4")
    assert remarks.totals()[-1].endswith(
        "odd stamps, decoded 1 times, the first: r:12: video a.mp4"
    )
    meant = Remarks(literal_markers=True)
    meant.add([("mark", "<image>")], where="r:1")
    assert meant.news() == meant.totals() == []
    indexed = Remarks(indexed=True)
    indexed.add([("mark", "<image>"), ("key", "id"), ("video", "odd")], where="r:1")
    assert list(indexed.found) == [("video", "odd")]


def run_data(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, words), "--processes", "1"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.not_quick
def test_rows_that_are_left_out_and_marks_that_are_text_are_said(
    processor, processor_folder, write_rows, row
):
    """By data check, data inspect, the index, and what a run is told; none is a bad row."""
    tagged = row("<image>Read", "1") | {"images": [], "source": "web"}
    path = write_rows(
        row("Read", "1"),
        row("Read", "1") | {"loss": False},
        tagged,
        row("Read", "1") | {"weight": 0},
        row("Read", "1") | {"weight": 1},
        tagged,
    )
    options = ("--tokenizer-model", processor_folder)
    keys = "keys without a use (rows that have them): 'source' (2)"
    mark = f"<image> as text in 2 rows, the first at {path}:3: "
    left_out = f"2 rows left out by loss or weight, the first at {path}:2"
    code, printed, said = run_data("check", path, *options, "--seq-length", 40)
    assert (code, printed) == (0, "")
    assert "6 rows in" in said
    assert all(each in said for each in ("all can be used", keys, mark, left_out))
    _, _, said = run_data("check", path, *options, "--seq-length", 40, "--literal-markers")
    assert mark not in said
    assert keys in said
    decides = settings_of(processor_folder)
    assert kept_table(JsonlIndex(path), decides) is not None  # by data check
    code, printed, said = run_data("index", path, *options)
    assert (code, printed) == (0, "")
    assert "4 rows in" in said
    assert "all of which can be used" in said
    table = kept_table(JsonlIndex(path), decides)
    assert table is not None
    assert (table.tokens > 0).tolist() == [True, False, True, False, True, True]
    longest = int(table.tokens.max())
    too_long = int((table.tokens == longest).sum())
    assert (table.unusable(longest), table.unusable(longest - 1)) == (0, too_long)
    assert table.remarks.found == {  # how many rows, and the number of the first
        MASKED: (2, "1"),
        ("key", "source"): (2, "2"),
        ("mark", "<image>"): (2, "2"),
    }
    dataset = ChatDataset(path, processor=processor, seq_length=40, training_phase="sft")
    samples = dataset.text_parts(range(6))
    assert [len(sample) for sample in samples] == table.tokens.tolist()
    bad = BadSamples("fatal")
    for sample in samples[1:4:2]:
        bad.meet(sample.bad)
    assert bad.counts == {"masked": 2}


@pytest.mark.not_quick
def test_ignored_keys_are_no_fault(processor_folder, write_rows, row):
    made = row("Read", "1")
    made["messages"][1]["score"] = 0.5
    path = write_rows(made)
    options = (path, "--tokenizer-model", processor_folder, "--seq-length", 40)
    code, printed, _ = run_data("check", *options)
    assert code == 1
    assert printed.startswith(f"{path}:1: messages[1] has the key 'score' (LoongPlug knows ")
    code, printed, said = run_data("check", *options, "--ignore-keys", "x, score")
    assert (code, printed) == (0, "")
    assert "'score' (1)" in said


def test_questions_and_answers_are_turns():
    """As LLaMA-Factory and ms-swift read them: the parts of a question in two lines."""
    told = {"system": "Be brief.", "history": [["Hi", "Hello"]], "images": ["i.png"]}
    asked = parse_conversation({"query": "<image>What?\nNow", "response": "A", **told}, where="r:1")
    assert [(each.role, each.parts) for each in asked.messages] == [
        ("system", ("Be brief.",)),
        ("user", ("Hi",)),
        ("assistant", ("Hello",)),
        ("user", (MediaPart("image", "i.png"), "What?\nNow")),
        ("assistant", ("A",)),
    ]
    parts = {"instruction": "<image>What?", "input": "Now", "output": "A"}
    assert parse_conversation(parts | told, where="r:1") == asked
    alone = {"instruction": "What?", "input": "", "output": "A"}
    assert parse_conversation(alone, where="r:1").messages[0].parts == ("What?",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a", "response": "b", "history": [["c"]]}, r"history\[0\] is \['c'\], but"),
        ({"query": "a", "response": "b", "history": [["c", None]]}, r"history\[0\]\[1\] is None"),
        ({"query": "a", "response": "b", "history": [["c", ""]]}, "message 2, .* is empty"),
        ({"instruction": "a", "output": 3}, "output is 3, but"),
        ({"instruction": "a"}, "output is missing"),
        ({"query": "a", "output": "b"}, r"key 'output' \(turns: "),
        ({"query": "a", "response": "b", "kto_tag": True}, "key 'kto_tag'"),
        ({"instruction": "a", "output": "b", "text": "c"}, "2 formats, instruction and text"),
        ({"text": "a", "history": [["b", "c"]]}, "key 'history'"),
        ({"prompt": "a", "completion": "b"}, "unknown schema .* say by --columns"),
    ],
)
def test_questions_and_answers_that_lack_a_part_are_refused(row, message):
    with pytest.raises(ValueError, match=f"^r:1: .*{message}"):
        parse_conversation(row, where="r:1")


def test_the_key_of_another_format_may_be_ignored():
    """The first Alpaca rows have the whole as a text, too."""
    row = {"instruction": "a", "output": "b", "text": "c"}
    kept = parse_conversation(row, where="r:1", ignored=["text"])
    assert kept.remarks == (("key", "text"),)
    assert len(kept.messages) == 2


def test_columns_give_our_names_to_keys(tmp_path, processor_folder, write_rows):
    """Of each kind of file, in whatever reads rows; keys may change places."""
    rows = [{"question": "a", "answer": "b", "query": None}, {"query": "c", "response": "d"}]
    path = write_rows(*rows)
    pairs = [{"query": "a", "response": "b"}, {"query": "c", "response": "d"}]
    access = RowAccess(columns="query=question, response=answer")
    opened = open_source(path, access=access)
    assert [opened.read(index) for index in range(2)] == pairs
    swapped = open_source(path, access=RowAccess(columns="query=response,response=query"))
    assert swapped.read(1) == {"query": "d", "response": "c"}
    options = ("--tokenizer-model", processor_folder, "--columns", access.columns)
    for command in (("check", "--seq-length", 40), ("inspect",), ("index",)):
        assert run_data(*command, path, *options)[0] == 0
    arrow = pytest.importorskip("pyarrow", reason="pip install 'loongplug[parquet]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    assert open_source(tmp_path / "rows.parquet", access=access).read(0) == pairs[0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("query", "'query' where OURS=THEIRS was expected"),
        ("query=", "'query=' where OURS=THEIRS"),
        ("query=a,response=a", "'response=a' where .* each of theirs once"),
        ("qurey=a", "qurey is no key of ours: expected OURS=THEIRS with one of audio, "),
        ("query=a,query=b", "r.*:1: --columns query=a,query=b gives one name to two keys"),
    ],
)
def test_columns_that_say_nothing_or_two_things_are_refused(columns, message, write_rows):
    path = write_rows({"a": "x", "b": "y"})
    with pytest.raises(ValueError, match=message):
        open_source(path, access=RowAccess(columns=columns)).read(0)
