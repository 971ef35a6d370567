"""Damaged checkpoints and trackers are told in one sentence, before a load and by what is read."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import write_checkpoint
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import StorageMeta

from loongplug.checkpoint.checkpoint_files import TRACKER, check_latest, check_whole, told_of_damage
from loongplug.checkpoint.resume_checks import checked_common_state, checked_load

pytestmark = pytest.mark.quick


def largest(checkpoint: Path) -> Path:
    """The file of the largest tensor."""
    return max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def a_pipe(file: Path) -> None:
    """Who opens it waits for ever."""
    file.unlink()
    os.mkfifo(file)


def saying(content: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(content)

    return write


def described(**changes: Any) -> Callable[[Path], None]:
    """A ``.metadata`` whose records, or their first one, are otherwise."""

    def write(file: Path) -> None:
        metadata = FileSystemReader(file.parent).read_metadata()
        if "records" in changes:
            metadata.storage_data = changes["records"]
        else:
            vars(next(iter(metadata.storage_data.values()))).update(changes)
        file.write_bytes(pickle.dumps(metadata))

    return write


def sentence(checkpoint: Path) -> str:
    with pytest.raises(ValueError, match=str(checkpoint.parent)) as raised:
        check_whole(checkpoint)
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "ends after"),
        (Path.unlink, "lacks __0_"),
        (a_pipe, "lacks __0_"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_whole(tmp_path, damage, says):
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        write_checkpoint(tmp_path, name)
    damage(largest(tmp_path / "iter_0000004"))
    damage(largest(tmp_path / "iter_0000006"))
    check_whole(tmp_path / "iter_0000002")
    text = sentence(tmp_path / "iter_0000006")
    assert says in text
    assert largest(tmp_path / "iter_0000002").name in text
    assert text.endswith(
        f"Whole in {tmp_path}, by the sizes of files, are: iter_0000002; give --ckpt-step N "
        "to load that of iteration N."
    )


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        (".metadata", truncated, ""),
        (".metadata", emptied, "EOFError"),
        (".metadata", saying(pickle.dumps(StorageMeta())), "describes no checkpoint"),
        (
            ".metadata",
            saying(pickle.dumps(os.getcwd)),
            "names posix.getcwd, which no checkpoint needs",
        ),
        (".metadata", described(relative_path="../elsewhere"), "what lies where"),
        (".metadata", described(length="9"), "what lies where"),
        (".metadata", described(records=None), "describes no checkpoint"),
        ("metadata.json", truncated, "JSONDecodeError"),
        ("metadata.json", saying(b"[" * 100_000), "RecursionError"),
        ("metadata.json", saying(b'{"\xff"'), "UnicodeDecodeError"),
        ("metadata.json", saying(b"[]"), "sharded_backend 'torch_dist'"),
        ("metadata.json", saying(b'{"sharded_backend": "zarr"}'), "sharded_backend 'torch_dist'"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, name, damage, why):
    checkpoint = write_checkpoint(tmp_path, "iter_0000002")
    damage(checkpoint / name)
    text = sentence(checkpoint)
    assert text.startswith(f"{checkpoint / name} cannot be read (")
    assert why in text
    assert text.endswith(f"No other checkpoint in {tmp_path} is whole.")


def test_of_many_whole_checkpoints_the_latest_are_named(tmp_path):
    for number in range(8):
        write_checkpoint(tmp_path, f"iter_{number:07d}")
    (tmp_path / ".saving_iter_0000009_ab").symlink_to(tmp_path / "iter_0000001")
    emptied(largest(tmp_path / "iter_0000007"))
    text = sentence(tmp_path / "iter_0000007")
    names = ", ".join(f"iter_{number:07d}" for number in (6, 5, 4, 3, 2))
    assert f"are: {names}, ...; give" in text


def overwritten(checkpoint: Path) -> None:
    file = largest(checkpoint)
    file.write_bytes(bytes(file.stat().st_size))


def read(checkpoint: Path) -> Any:
    """As Megatron reads tensors: torch's own load, each rank for itself."""
    state: Any = {"weight": torch.zeros(64), "bias": torch.zeros(4)}
    load(state, checkpoint_id=checkpoint, no_dist=True)
    return state["weight"]


def test_damage_that_only_a_read_finds_is_told_alike(tmp_path):
    write_checkpoint(tmp_path, "iter_0000002")
    checkpoint = write_checkpoint(tmp_path, "iter_0000004")

    def loaded(state: Any, folder: str, *, strict: str) -> Any:
        return read(Path(folder))

    load_checked = partial(checked_load(loaded), {}, str(checkpoint), strict="ignore_all")
    assert load_checked().tolist() == list(range(64))
    overwritten(checkpoint)
    check_whole(checkpoint)  # its sizes are right
    with pytest.raises(ValueError, match="cannot be read") as raised:
        load_checked()
    assert str(raised.value) == (
        f"{largest(checkpoint)} cannot be read (some of it is not a saved tensor): copy or save "
        f"the checkpoint again. Whole in {tmp_path}, by the sizes of files, are: iter_0000002; "
        "give --ckpt-step N to load that of iteration N."
    )


def test_what_is_no_tensor_is_told_alike(tmp_path):
    checkpoint = write_checkpoint(tmp_path, "iter_0000004")

    def common(folder: Path) -> Any:
        return torch.load(folder / "common.pt", weights_only=True)

    for content in (b"", b"PK\x03\x04", pickle.dumps(os.getcwd)):
        (checkpoint / "common.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"/common\.pt cannot be read"):
            checked_common_state(common)(checkpoint)


def test_other_errors_are_left_alone(tmp_path):
    checkpoint = write_checkpoint(tmp_path, "iter_0000004")

    def no_room(*_: Any) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", no_room)
        with (
            pytest.raises(BaseException, match="MemoryError") as raised,
            told_of_damage(checkpoint),
        ):
            read(checkpoint)
    assert not isinstance(raised.value, ValueError)


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


def test_a_release_goes_before_a_step(tmp_path):
    """Megatron would load the release without a word."""
    write_checkpoint(tmp_path, "release")
    write_checkpoint(tmp_path, "iter_0000002")
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(ValueError, match="goes before --ckpt-step 2; write 2 into it"):
        check_latest(tmp_path, step=2)
