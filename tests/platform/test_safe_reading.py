"""Checkpoints are read without running what they contain."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    load,
    save,
)

from loongplug.platform.safe_reading import load_metadata

pytestmark = pytest.mark.quick


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def saved(folder: Path) -> Path:
    state = {"tensor": torch.arange(3.0), "half": torch.ones(2, dtype=torch.bfloat16), "plain": [1]}
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_is_read(tmp_path):
    state: Any = {"tensor": torch.zeros(3), "plain": None}
    load(state, checkpoint_id=saved(tmp_path), no_dist=True)
    assert state["tensor"].tolist() == [0.0, 1.0, 2.0]
    assert state["plain"] == [1]
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata["half"].properties.dtype is torch.bfloat16


def test_metadata_that_would_run_something_is_refused(tmp_path):
    made = tmp_path / "made"
    (saved(tmp_path) / ".metadata").write_bytes(pickle.dumps(Runs(made)))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir, which no checkpoint needs"):
        FileSystemReader(tmp_path).read_metadata()
    assert not made.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch", "serialization.load"),
        ("builtins", "eval"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.planner", "abc"),
    ],
)
def test_names_beside_descriptions_are_refused(module, name):
    data = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        load_metadata(io.BytesIO(data + b"\x93."))


def test_an_object_that_would_run_something_is_refused(tmp_path):
    made = tmp_path / "made"
    save({"plain": Runs(made)}, checkpoint_id=tmp_path, no_dist=True)
    state: Any = {"plain": None}
    with pytest.raises(CheckpointException, match=r"distcp cannot be read .*names posix\.mkdir"):
        load(state, checkpoint_id=tmp_path, no_dist=True)
    assert not made.exists()
