"""The ways through the code on the page are those that runs take."""

import pytest

from pages.commands import ROOT
from pages.marked import content
from pages.ways import FEATURE, MICROBATCH, Files, all_ways, parts

PAGE = ROOT / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Files]]:
    return all_ways(tmp_path_factory.mktemp("rows"))


def test_docs_show_the_ways_as_they_are(found: dict[str, dict[str, Files]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, part in parts(found).items():
        assert content(text, name) == part, (
            "docs/architecture.md is stale: "
            "run 'PYTHONPATH=tests python -m pages.ways docs/architecture.md'"
        )


def test_what_is_passed_and_what_is_not(found: dict[str, dict[str, Files]]) -> None:
    """Held against what one knows of these runs."""
    padded, packs = found[MICROBATCH.name].values()
    assert padded[0] == packs[0] == "data/loader.py"
    assert padded.index("data/row_files.py") < padded.index("models/decoder.py")
    assert "data/packing.py" in {*packs} - {*padded}
    uniform, separated = found[FEATURE.name].values()
    assert not any(file.startswith("hetero/") for file in uniform)
    assert {"hetero/executor.py", "hetero/exchange.py"} <= {*separated}
    # Behind the loss, before the data, and of other runs.
    every = {*padded, *packs, *uniform, *separated}
    assert not every & {"parallel/optimizer_per_module.py", "training/arguments.py"}
    assert not every & {"data/video.py", "checkpoint/hf_import.py"}
