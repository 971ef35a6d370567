"""The ways through the code on the page are those that runs take."""

import pytest

from pages.commands import ROOT
from pages.ways import (
    FEATURE,
    MICROBATCH,
    WAYS,
    Files,
    all_ways,
    first_sentence,
    in_one_order,
    markdown,
    with_ways,
)

PAGE = ROOT / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Files]]:
    return all_ways(tmp_path_factory.mktemp("rows"))


def test_docs_show_the_ways_as_they_are(found: dict[str, dict[str, Files]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_ways(text, found), (
        "docs/architecture.md is stale: "
        "run 'PYTHONPATH=tests python -m pages.ways docs/architecture.md'"
    )


def test_what_is_passed_and_what_is_not(found: dict[str, dict[str, Files]]) -> None:
    """Held against what one knows of these runs."""
    padded, packs = found[MICROBATCH.name].values()
    assert padded[0] == packs[0] == "data/loader.py"
    assert {"data/jsonl.py", "data/template.py", "models/decoder.py"} <= {*padded} & {*packs}
    assert padded.index("data/jsonl.py") < padded.index("models/decoder.py")
    assert "data/packing.py" in {*packs} - {*padded}
    uniform, separated = found[FEATURE.name].values()
    assert uniform[0] == separated[0] == "models/multimodal.py"
    assert not any(file.startswith("hetero/") for file in uniform)
    assert {"hetero/executor.py", "hetero/exchange.py"} <= {*separated}
    every = {*padded, *packs, *uniform, *separated}
    # Behind the loss, before the data, and of other runs.
    assert not every & {"parallel/optimizer_per_module.py", "training/arguments.py"}
    assert not every & {"data/video.py", "checkpoint/hf_import.py"}


@pytest.mark.quick
def test_files_of_another_run_stand_behind_those_before_them() -> None:
    assert in_one_order([("a", "b", "c"), ("b", "x", "y", "c", "z")]) == [*"abxycz"]
    assert in_one_order([("a",), ("x", "a")]) == ["x", "a"]


@pytest.mark.quick
def test_the_first_sentence_of_a_docstring() -> None:
    assert first_sentence('"""What it is,\nin two lines. More.\n\nAnd more."""') == (
        "What it is, in two lines"
    )
    assert first_sentence('"""Whole."""') == "Whole"
    assert first_sentence("") == ""


@pytest.mark.quick
def test_every_table_s_rows_have_its_cells() -> None:
    blocks = markdown({"one": ("data/jsonl.py", "data/rows.py"), "two": ("models/parts.py",)})
    for block in blocks.split("\n\n"):
        rows = block.splitlines()
        if rows[0].startswith("|"):
            assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert "| one | 2 | 0 |" in blocks
    assert "| two | 0 | 1 |" in blocks
    assert "<b>data</b><br/>jsonl.py, rows.py" in blocks


@pytest.mark.quick
def test_a_page_without_the_marks_is_not_written() -> None:
    begin, _ = WAYS[0].marks
    with pytest.raises(ValueError, match="needs one line"):
        with_ways(begin, {way.name: {"one": ()} for way in WAYS})
