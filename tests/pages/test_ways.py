"""The ways through the code on the page are those that runs take."""

import pytest

from pages.commands import ROOT
from pages.ways import FEATURE, MICROBATCH, WAYS, Files, all_ways, markdown, with_ways

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
    assert {"data/row_files.py", "data/tokens.py", "models/decoder.py"} <= {*padded} & {*packs}
    assert padded.index("data/row_files.py") < padded.index("models/decoder.py")
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
def test_one_run_is_drawn_and_files_of_the_others_alone_are_named() -> None:
    found = {
        "one": ("data/jsonl.py", "data/rows.py", "models/layers/norm.py", "data/order.py"),
        "two": ("data/jsonl.py", "models/parts.py"),
    }
    table, drawing = markdown(found, drawn="one").split("\n\n")
    assert table.splitlines()[2:] == ["| one | 3 | 1 |  |", "| two | 1 | 1 | `models/parts.py` |"]
    assert {row.count("|") for row in table.splitlines()} == {5}
    assert drawing.splitlines()[2:-1] == [
        '    box0["<b>data</b><br/>jsonl.py, rows.py, order.py"]',
        '    box0 --> box1["<b>models</b><br/>layers/norm.py"]',
    ]


@pytest.mark.quick
def test_a_page_without_the_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="needs one line"):
        with_ways(f"<!-- {WAYS[0].name}: begin -->\n", {way.name: {way.drawn: ()} for way in WAYS})
