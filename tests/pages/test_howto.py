"""The commands of the how-to pages are run as they stand there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pages.commands import ROOT, blocks, run_page, run_script, section

HOWTO = ROOT / "docs" / "howto"
BOUND = 1150.0  # seconds: a page takes one to three minutes where the cores are free


def whole_page(test: Callable[..., None]) -> Callable[..., None]:
    """A test that is run with --all: the page's commands are tested one by one elsewhere."""
    for mark in (pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(1200)):
        test = mark(test)
    return test


@whole_page
@pytest.mark.parametrize(
    ("page", "said"),
    [
        (HOWTO / "choose_a_layout.md", ["verdict: agrees"]),
        (HOWTO / "train_with_lora.md", ["PeftModel"]),
        (HOWTO.parent / "adding_a_model.md", ["Qwen2VisionConfig", "verdict: agrees"]),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_a_page_s_commands_say(page: Path, said: list[str], tmp_path: Path) -> None:
    printed = run_page(page, folder=tmp_path, timeout=BOUND)
    assert all(each in printed for each in said)


@whole_page
def test_own_data_in_ten_minutes(tmp_path: Path) -> None:
    run_page(HOWTO / "your_own_data.md", folder=tmp_path, timeout=BOUND)
    score = json.loads((tmp_path / "runs/mine/score.json").read_text())
    assert score["exact_match"] >= 0.95


@pytest.mark.slow
def test_an_encoder_of_your_own(demo: Path, tmp_path: Path) -> None:
    """To the word: its files, its commands, and the one that is refused."""
    page = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    part = section(page, "An encoder of your own")
    (refused,) = (block.text for block in blocks(part) if block.reason is not None)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(demo)
    printed = run_script(
        part, folder=tmp_path, timeout=BOUND, of="the section", then=f"! {refused}"
    )
    trained, agrees, rest = printed.partition("verdict: agrees")
    assert "iteration 4/4" in trained
    assert (tmp_path / "runs/mine/latest_checkpointed_iteration.txt").read_text() == "4"
    assert agrees
    assert "iteration" not in rest
    (said,) = (line for line in rest.splitlines() if line.startswith("loongplug: error"))
    assert f"```\n{said}\n```" in part


@whole_page
def test_coming_from_other_trainers(tmp_path: Path) -> None:
    run_page(HOWTO / "coming_from.md", folder=tmp_path, timeout=BOUND)
    assert (tmp_path / "runs/swift/adapter_config.json").is_file()
    assert (tmp_path / "runs/trl/model.safetensors").is_file()


@whole_page
def test_extend_a_run(tmp_path: Path) -> None:
    run_page(HOWTO / "extend_a_run.md", folder=tmp_path, timeout=BOUND)
    assert (tmp_path / "runs/long/latest_checkpointed_iteration.txt").read_text() == "12"
