"""Every output of a run is tried at its start, by the rank that will write it."""

import errno
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loongplug.checkpoint.save_lock import LOCK_FILE
from loongplug.training.outputs import outputs_ready, unwritable

pytestmark = pytest.mark.quick

FOLDERS = ("save", "trace", "tensorboard_dir", "save_hf", "save_lora")


def args(*, rank: int = 0, ranks: int = 1, **given: Any) -> Namespace:
    none = dict.fromkeys((*FOLDERS, "metrics_json", "metrics_name"))
    return Namespace(**none | {"rank": rank, "ranks": ranks} | given)


def all_outputs(folder: Path, **more: Any) -> Namespace:
    given = {name: str(folder / "new" / name) for name in FOLDERS}
    return args(**given, metrics_json=str(folder / "figures" / "metrics.json"), **more)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_what_can_be_written_leaves_nothing_behind(tmp_path):
    assert unwritable(all_outputs(tmp_path)) == []
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    # Checkpoints, events and traces will come there; an export that may never come has no folder.
    assert made == ["new", "new/save", "new/tensorboard_dir", "new/trace"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_and_a_parent_that_is_a_file(tmp_path, name):
    (tmp_path / "file").touch()
    (problem,) = unwritable(args(**{name: str(tmp_path / "file")}))
    assert problem == f"{flag(name)} {tmp_path / 'file'} is a file: give a folder."
    (problem,) = unwritable(args(**{name: str(tmp_path / "file" / "more")}))
    assert problem.startswith(f"{flag(name)} {tmp_path}/file/more cannot be written ([Errno 20]")


@pytest.mark.parametrize("name", [*FOLDERS, "metrics_json"])
def test_a_name_that_no_file_system_takes(tmp_path, name):
    (problem,) = unwritable(args(**{name: str(tmp_path / ("x" * 300))}))
    assert problem.startswith(f"{flag(name)} {tmp_path}/xxx")
    assert "cannot be written ([Errno 36]" in problem


def test_metrics(tmp_path):
    (problem,) = unwritable(args(metrics_json=str(tmp_path)))
    assert "is a folder: give a file" in problem
    (tmp_path / "file").write_text("no JSON")
    (problem,) = unwritable(args(metrics_json=str(tmp_path / "file" / "metrics.json")))
    assert "--metrics-json" in problem
    assert unwritable(args(metrics_json=str(tmp_path / "file"))) == []  # which gives way
    (problem,) = unwritable(args(metrics_json=str(tmp_path / "file"), metrics_name="sft"))
    assert "is not JSON" in problem


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device): make room, or give another place."),
        (errno.EDQUOT, "No space left on device: the quota is used up): make room"),
        (errno.EROFS, "Read-only file system): give another place."),
    ],
)
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, number, words):
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)  # before that a full disk may take a few bytes
    problems = unwritable(all_outputs(tmp_path))
    assert len(problems) == len(FOLDERS) + 1
    assert all(words in problem for problem in problems)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_each_rank_tries_what_it_writes(tmp_path):
    (tmp_path / "new").touch()
    (tmp_path / "figures").touch()
    found = [
        {problem.split()[0] for problem in unwritable(all_outputs(tmp_path, rank=r, ranks=3))}
        for r in range(3)
    ]
    every = {"--save", "--trace"}
    assert found[0] == every | {"--save-hf", "--save-lora", "--metrics-json"}
    assert found[1:] == [every, every | {"--tensorboard-dir"}]


def test_a_run_has_its_folder_alone_and_starts_with_good_outputs_only(tmp_path):
    with outputs_ready(all_outputs(tmp_path)):
        assert (tmp_path / "new" / "save" / LOCK_FILE).exists()
    assert not (tmp_path / "new" / "save" / LOCK_FILE).exists()
    at_end: list[Callable[[], None]] = []
    with outputs_ready(all_outputs(tmp_path), at_end=at_end.append):
        for each in at_end:  # another rank has failed: no context is left
            each()
        assert not (tmp_path / "new" / "save" / LOCK_FILE).exists()
    with (
        pytest.raises(ValueError, match=r"--save-hf .* is a file"),
        outputs_ready(args(save_hf=__file__)),
    ):
        pass
