"""Every output of a run is tried at its start, by the rank that will write it."""

import errno
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import write_checkpoint

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.save_lock import LOCK_FILE
from loongplug.observe.trace_file import TraceWriter, rank_file
from loongplug.training.outputs import outputs_ready, unwritable

pytestmark = pytest.mark.quick

FILLED = ("save", "trace", "tensorboard_dir")
FOLDERS = (*FILLED, "save_hf", "save_lora")


def args(*, rank: int = 0, ranks: int = 1, **given: Any) -> Namespace:
    none = dict.fromkeys((*FOLDERS, "metrics_json", "metrics_name", "load", "finetune"))
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
    place = tmp_path / "file" / ("" if name in FILLED else "more")
    (problem,) = unwritable(args(**{name: str(place)}))
    assert problem == f"{flag(name)} {tmp_path / 'file'} is a file: give a folder."
    (problem,) = unwritable(args(**{name: str(place / "more")}))
    assert problem.startswith(f"{flag(name)} {place / 'more'} cannot be written ([Errno 20]")


def test_metrics(tmp_path):
    (problem,) = unwritable(args(metrics_json=str(tmp_path)))
    assert problem.startswith(f"--metrics-json {tmp_path} is a folder")
    theirs, link = tmp_path / "train.jsonl", tmp_path / "link.json"
    theirs.write_text('{"messages": []}\n')
    link.symlink_to(theirs)
    (problem,) = unwritable(args(metrics_json=str(theirs / "metrics.json")))
    assert "--metrics-json" in problem
    for name in (None, "sft"):
        for path in (theirs, link):
            (problem,) = unwritable(args(metrics_json=str(path), metrics_name=name))
            assert problem.startswith(f"--metrics-json {path} is there and would be lost")
    theirs.write_text("")
    given: list[dict[str, Any]] = [{"train_data_path": ["0.5", str(link)]}, {"load_hf": str(link)}]
    for each in given:
        (problem,) = unwritable(args(metrics_json=str(theirs), **each))
        assert f"{theirs} is {link}, which the run needs" in problem
    os.mkfifo(tmp_path / "pipe")
    assert unwritable(args(metrics_json=str(tmp_path / "pipe"))) == []


def test_a_trace_replaces_only_traces(tmp_path):
    TraceWriter(tmp_path, rank=0, world_size=2, device="cpu").close()
    assert unwritable(args(trace=str(tmp_path))) == []
    rank_file(tmp_path, 1).write_text('{"messages": []}\n')
    assert unwritable(args(trace=str(tmp_path))) == []
    (problem,) = unwritable(args(trace=str(tmp_path), rank=1, ranks=2))
    assert problem.startswith(f"--trace {rank_file(tmp_path, 1)} is there and would be lost")


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
        assert all((tmp_path / "new" / name / LOCK_FILE).exists() for name in ("save", "trace"))
    assert not list(tmp_path.rglob(LOCK_FILE))
    with outputs_ready(args(save=str(tmp_path / "new"), trace=f"{tmp_path}/new/../new")):
        assert len(list(tmp_path.rglob(LOCK_FILE))) == 1  # of both
    at_end: list[Callable[[], None]] = []
    with outputs_ready(all_outputs(tmp_path), at_end=at_end.append):
        for each in at_end:  # another rank has failed: no context is left
            each()
        assert not list(tmp_path.rglob(LOCK_FILE))
    with (
        pytest.raises(ValueError, match=r"--save-hf .* is a file"),
        outputs_ready(args(save_hf=f"{__file__}/hf")),
    ):
        pass


@pytest.mark.parametrize(
    ("held", "flags", "refused"),
    [
        ("whole", {}, True),  # --load-hf, or nothing
        ("whole", {"load": "save"}, False),
        ("whole", {"load": "link"}, False),
        ("whole", {"load": "save", "finetune": True}, True),
        ("whole", {"load": "other"}, True),
        ("lost tracker", {}, True),
        ("lost tracker", {"load": "save"}, False),  # or a run that was killed behind its first save
        ("lost tracker", {"load": "save", "finetune": True}, True),
        ("set aside", {}, True),
        ("cut off", {}, False),
        ("cut off", {"load": "save"}, False),
        ("unfinished", {"load": "save"}, False),
        ("empty", {"load": "save"}, False),
        ("empty", {"load": "other", "finetune": True}, False),
    ],
)
def test_a_run_replaces_no_other_ones_checkpoints(tmp_path, held, flags, refused):
    """Files of the folder stay as they are where it is refused."""
    save, other = tmp_path / "save", tmp_path / "other"
    for folder in (save, other):
        folder.mkdir()
    (tmp_path / "link").symlink_to(save)
    write_checkpoint(other, "iter_0000003")
    (other / TRACKER).write_text("3")
    if held != "empty":
        checkpoint = write_checkpoint(save, "iter_0000002")
        (save / TRACKER).write_text("2")
        if held == "lost tracker":
            (save / TRACKER).unlink()
        elif held == "set aside":
            checkpoint.rename(save / ".replaced_iter_0000002")
        elif held == "cut off":
            next(checkpoint.glob("*.distcp")).write_bytes(b"")
        elif held == "unfinished":
            (checkpoint / "metadata.json").unlink()
    given = {name: str(tmp_path / value) for name, value in flags.items() if name == "load"}
    outputs = outputs_ready(args(save=str(save), **{**flags, **given}))
    if refused:
        with pytest.raises(ValueError, match=r"iter_0000002.*--load .*save"), outputs:
            pass
    else:
        with outputs:
            pass
    assert (save / "iter_0000002").exists() == (held != "empty")
    tracked = held != "empty" and (held != "lost tracker" or not refused)
    assert tracked == ((save / TRACKER).is_file() and (save / TRACKER).read_text() == "2")
