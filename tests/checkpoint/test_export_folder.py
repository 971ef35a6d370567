"""An export takes the place of an earlier export and of nothing else, whenever it is killed."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from loongplug.checkpoint.export_folder import (
    EXPORT_LIST,
    check_export_folder,
    is_half_replaced,
    new_export,
)

OLD = {"a.safetensors": "old a", "b.safetensors": "old b", "config.json": "{}", "t/a.jinja": "old"}
NEW = {"a.safetensors": "new a", "c.safetensors": "new c", "config.json": "[1]", "t/a.jinja": "new"}


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        os.makedirs((folder / name).parent, exist_ok=True)
        (folder / name).write_text(text)


def export(
    folder: Path,
    files: dict[str, str],
    *,
    meanwhile: Callable[[Path], None] = lambda folder: None,
) -> None:
    with new_export(folder, kind="model") as new:
        fill(new, files)
        meanwhile(folder)


def check(folder: Path, kind: str = "model") -> None:
    check_export_folder(folder, kind=kind)


def contents(folder: Path) -> dict[str, str]:
    """All that is in a folder, also hidden; the place of a link is its text."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or (path.is_file() and path.name != EXPORT_LIST)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export."""
    folder = tmp_path / "deeper" / "hf"
    export(folder, OLD)
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("given", ["folder", "link"])
def test_an_export_takes_an_earlier_one_s_place(folder, tmp_path, given):
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o750)
    target = folder if given == "folder" else tmp_path / "link"
    check(target)
    export(target, NEW)
    assert contents(folder) == NEW
    assert folder.stat().st_mode & 0o777 == 0o750
    listed = json.loads((folder / EXPORT_LIST).read_text())["files"]
    assert {name: file["size"] for name, file in listed.items()} == {
        name: len(text) for name, text in NEW.items()
    }
    assert os.listdir(folder.parent) == ["hf"]
    export(target, OLD)  # and again
    assert contents(folder) == OLD


def add(folder: Path) -> None:
    (folder / "README.md").write_text("mine")


def moved_behind_a_link(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


def change_list(folder: Path, **change: Any) -> None:
    path = folder / EXPORT_LIST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def list_what_lies_outside(folder: Path) -> None:
    (folder.parent / "mine").write_text("mine")
    change_list(folder, files={"../mine": {"size": 4, "written_ns": 0}})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda folder: (folder / "config.json").write_text("[]"),  # of the same size
            r"changed or removed since: config\.json\. Give another folder",
        ),
        (
            lambda folder: (folder / "b.safetensors").unlink(),
            r"changed or removed since: b\.safetensors",
        ),
        (
            lambda folder: moved_behind_a_link(folder, "b.safetensors"),
            r"changed or removed since: b\.safetensors",
        ),
        (
            lambda folder: moved_behind_a_link(folder, "t"),
            r"changed or removed since: t/a\.jinja; not from the export: t\.",
        ),
        (add, r"not from the export: README\.md"),
        (
            lambda folder: fill(folder, {"t/deeper/b.jinja": "mine"}),
            r"not from the export: t/deeper/b\.jinja",
        ),
        (lambda folder: (folder / "mine").mkdir(), "not from the export: mine/"),
        (
            lambda folder: (folder / EXPORT_LIST).unlink(),
            f"is not empty and is not wholly an earlier export .* has no {EXPORT_LIST}",
        ),
        (lambda folder: (folder / EXPORT_LIST).write_text("{"), "is damaged"),
        (lambda folder: change_list(folder, version=1), "of another version"),
        (list_what_lies_outside, r"changed or removed since: \.\./mine; not from the export: a\."),
    ],
)
def test_anything_else_is_refused_at_the_start_and_when_the_export_is_built(folder, change, words):
    with pytest.raises(ValueError, match=words):
        export(folder, NEW, meanwhile=change)
    before = contents(folder.parent)
    for refused in (check, lambda folder: export(folder, NEW)):
        with pytest.raises(ValueError, match=words):
            refused(folder)
    assert contents(folder.parent) == before
    assert not [*folder.parent.glob(".*")]


@pytest.mark.quick
def test_other_places_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"another kind \(model, not adapters\)"):
        check(folder, kind="adapters")
    with pytest.raises(ValueError, match="is a file"):
        check(folder / "config.json")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(ValueError, match="is a mount"):
        check(folder)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["", "new", "old"])
def test_what_is_behind_a_link_in_the_hidden_folder_s_place_stays(folder, tmp_path, name):
    for part in ("new", "old"):
        export(tmp_path / "elsewhere" / part, OLD)
    hidden = folder.parent / ".hf.loongplug_export" / name
    hidden.parent.mkdir(exist_ok=True)
    hidden.symlink_to(tmp_path / "elsewhere" / name)
    before = contents(tmp_path)
    for start in (check, lambda folder: export(folder, NEW)):
        with pytest.raises(ValueError, match=r"cannot be written .* is a link"):
            start(folder)
    assert contents(tmp_path) == before


class Killed(BaseException):
    """Stands for SIGKILL: nothing that tidies up may run after it, which ``kill_at`` sees to."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """From its ``number``-th change on, the process changes nothing; how many there were."""
    done = 0

    def counted(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done >= number:
                raise Killed
            return original(*args, **kwargs)

        return change

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: done


@pytest.mark.quick
@pytest.mark.parametrize("made_meanwhile", [False, True])
@pytest.mark.parametrize("earlier", [OLD, None], ids=["older-export", "new-folder"])
def test_killed_at_any_change_the_old_or_the_new_export_is_there(tmp_path, earlier, made_meanwhile):
    number, seen = 1, set()
    while True:
        folder = tmp_path / str(number) / "hf"
        if earlier is not None:
            export(folder, earlier)
        with pytest.MonkeyPatch.context() as patch:
            changes = kill_at(patch, number)
            with suppress(Killed):
                export(folder, NEW)
            if changes() < number:
                break
        if folder.exists():
            assert contents(folder) in (earlier, NEW), number
        elif earlier is not None:
            assert is_half_replaced(folder)
        if made_meanwhile:
            folder.mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:  # the next start is killed, too
            kill_at(patch, 3)
            with suppress(Killed):
                check(folder)
        check(folder)
        after = contents(folder) if folder.exists() else {}
        assert after in (earlier or {}, NEW), number
        seen.add(after.get("a.safetensors"))
        export(folder, NEW)
        assert contents(folder.parent) == {f"hf/{name}": text for name, text in NEW.items()}
        number += 1
    assert seen == {None if earlier is None else "old a", "new a"}
    assert number > 5


@pytest.mark.quick
def test_an_earlier_export_stays_when_others_have_filled_its_place(folder):
    hidden = folder.parent / ".hf.loongplug_export"
    hidden.mkdir()
    folder.rename(hidden / "old")  # as a run does that is killed then
    folder.mkdir()
    add(folder)
    for refused in (check, lambda folder: export(folder, NEW)):
        with pytest.raises(ValueError, match="not wholly an earlier export"):
            refused(folder)
    shutil.rmtree(folder)
    check(folder)
    assert contents(folder) == OLD


@pytest.mark.quick
def test_an_export_that_is_half_removed_never_returns(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **how: None)  # killed, or read by a server
        export(folder, NEW)
    shutil.move(folder, folder.parent / "mine")
    check(folder)
    assert contents(folder.parent) == {f"mine/{name}": text for name, text in NEW.items()}


@pytest.mark.quick
def test_a_folder_that_cannot_be_moved_away_is_refused_at_the_start(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)  # root may do all
    with pytest.raises(ValueError, match=r"hf cannot be written .*Permission denied"):
        check(folder)


@pytest.mark.quick
@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_the_older_export(folder, monkeypatch, failing):
    rename, done = os.rename, 0

    def fail(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(*args)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        export(folder, NEW)
    assert contents(folder.parent) == {f"hf/{name}": text for name, text in OLD.items()}
    export(folder, NEW)
    assert contents(folder) == NEW


def on_ranks(rank: int, *, folder: Path, fails: bool) -> tuple[str, str]:
    """What a rank is told that exports with others, and one that comes while they do."""
    other = ""
    try:
        with new_export(folder, kind="model") as new:
            fill(new, {name: NEW[name] for name in sorted(NEW)[rank::3]})
            if rank == 1:
                with pytest.raises(ValueError, match="in use") as caught:
                    check(folder)
                other = str(caught.value)
            if fails and rank == 0:
                add(folder)
            dist.barrier()
    except ValueError as error:
        return str(error), other
    return "", other


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_fill_it_alone_and_end_together(folder, fails):
    told, others = zip(*run_ranks(on_ranks, 3, folder=folder, fails=fails), strict=True)
    assert "is in use by another run" in others[1]
    assert len(set(told)) == 1
    if fails:
        assert "README.md" in told[0]
        assert contents(folder) == OLD | {"README.md": "mine"}
    else:
        assert told[0] == ""
        assert contents(folder) == NEW


@pytest.mark.quick
def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        export(tmp_path / "file" / "hf", NEW)
    assert os.listdir(tmp_path) == ["file"]
