"""Megatron's tracker file: written whole, and believed only where its checkpoint is there."""

from pathlib import Path

import pytest
from small_checkpoints import write_checkpoint

from loongplug.checkpoint.tracker import TRACKER, check_latest, replaced_whole

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("text", ["", "iter", "-1", "1.5", "\0\0", "\u0664", "1" * 5000])
def test_a_damaged_tracker_is_named_with_what_there_is(tmp_path, text):
    write_checkpoint(tmp_path, "iter_0000003")
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(ValueError, match=r"latest.*into it: iter_0000003\.$"):
        check_latest(tmp_path)


def test_the_latest_checkpoint_has_to_be_complete(tmp_path):
    write_checkpoint(tmp_path, "iter_0000003")
    (tmp_path / TRACKER).write_text("4\n")
    (tmp_path / "iter_0000004").mkdir()
    with pytest.raises(ValueError, match=r"no complete checkpoint iter_0000004.*iter_0000003"):
        check_latest(tmp_path)
    assert check_latest(tmp_path, step=3) == tmp_path / "iter_0000003"
    with pytest.raises(ValueError, match=r"iter_0000005, which --ckpt-step asks for"):
        check_latest(tmp_path, step=5)


@pytest.mark.parametrize(("text", "name"), [("12", "iter_0000012"), ("release", "release")])
def test_a_complete_checkpoint_passes(tmp_path, text, name):
    write_checkpoint(tmp_path, name)
    (tmp_path / TRACKER).write_text(text)
    assert check_latest(tmp_path) == tmp_path / name


def test_a_release_goes_before_a_step(tmp_path):
    """Megatron would load the release without a word."""
    write_checkpoint(tmp_path, "release")
    write_checkpoint(tmp_path, "iter_0000002")
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(ValueError, match="goes before --ckpt-step 2; write 2 into it"):
        check_latest(tmp_path, step=2)


def test_the_tracker_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / TRACKER
    path.write_text("1")
    open_ = replaced_whole(open)
    with open_(str(path), "w") as file:
        file.write("2")
        assert path.read_text() == "1"
    assert path.read_text() == "2"
    with open_(path) as file:
        assert file.read() == "2"
    assert list(tmp_path.iterdir()) == [path]


def fails_half_way(path: Path) -> None:
    with replaced_whole(open)(path, "w") as file:
        file.write("2")
        raise OSError("full")


def test_an_error_while_writing_leaves_the_tracker(tmp_path):
    path = tmp_path / TRACKER
    path.write_text("1")
    with pytest.raises(OSError, match="full"):
        fails_half_way(path)
    assert path.read_text() == "1"


def test_other_files_are_opened_as_ever(tmp_path):
    with replaced_whole(open)(tmp_path / "metadata.json", "w", encoding="utf-8") as file:
        file.write("{}")
    assert (tmp_path / "metadata.json").read_text() == "{}"
