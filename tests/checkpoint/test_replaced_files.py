"""An export replaces what an export wrote, and nothing else, whenever it is killed."""

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

from loongplug.checkpoint import replaced_files as module
from loongplug.checkpoint.manifest import HIDDEN, MANIFEST_FILE, read_manifest
from loongplug.checkpoint.replaced_files import (
    check_replaceable,
    is_half_replaced,
    replaced_files,
)

OLD = {
    "a.safetensors": "old a",
    "b.safetensors": "old b",
    "config.json": "{}",
    "templates/a.jinja": "old",
}
NEW = {
    "a.safetensors": "new a",
    "c.safetensors": "new c",
    "config.json": '{"new": 1}',
    "templates/a.jinja": "new",
    "templates/b.jinja": "new",
}
FOREIGN = {"README.md": "mine", "eval_results/scores.json": "[1]"}


def export(
    folder: Path,
    files: dict[str, str],
    *,
    meanwhile: Callable[[Path], None] = lambda folder: None,
) -> None:
    with replaced_files(folder, kind="model", rank=0) as building:
        for name, text in files.items():
            os.makedirs((building.folder / name).parent, exist_ok=True)
            (building.folder / name).write_text(text)
        meanwhile(folder)


def check(folder: Path, *, kind: str = "model", also: str = "") -> None:
    check_replaceable(folder, kind=kind, writes=lambda name: name in {*NEW, also})


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST_FILE
    }


def add_foreign(folder: Path) -> None:
    for name, text in FOREIGN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export to which files of others were added."""
    folder = tmp_path / "deeper" / "hf"
    export(folder, OLD)
    add_foreign(folder)
    return folder


@pytest.mark.quick
def test_an_export_replaces_its_own_files_and_leaves_all_others(folder):
    check(folder)
    export(folder, NEW)
    assert contents(folder) == NEW | FOREIGN
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {name: file.size for name, file in manifest.files.items()} == {
        name: len(text) for name, text in NEW.items()
    }
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]
    export(folder, OLD)  # and again
    assert contents(folder) == OLD | FOREIGN


def edit(folder: Path) -> None:
    (folder / "config.json").write_text("[]")  # of the same size


def shorten(folder: Path) -> None:
    (folder / "b.safetensors").write_text("b")


def remove(folder: Path) -> None:
    (folder / "b.safetensors").unlink()


def link(folder: Path) -> None:
    shutil.move(folder / "b.safetensors", folder.parent / "b")
    (folder / "b.safetensors").symlink_to(folder.parent / "b")


def link_folder(folder: Path) -> None:
    shutil.move(folder / "templates", folder.parent / "templates")
    (folder / "templates").symlink_to(folder.parent / "templates")


def add_within(folder: Path) -> None:
    (folder / "templates" / "b.jinja").write_text("mine")


def add(folder: Path) -> None:
    (folder / "c.safetensors").write_text("mine")


def unlist(folder: Path) -> None:
    (folder / MANIFEST_FILE).unlink()  # as in exports from before there were lists


def damage(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{")


def climb(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    found = json.loads(path.read_text())
    found["files"]["../hf/README.md"] = found["files"].pop("config.json")
    path.write_text(json.dumps(found))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit, "changed or removed since LoongPlug exported them: config.json"),
        (shorten, "changed or removed since LoongPlug exported them: b.safetensors"),
        (remove, "changed or removed since LoongPlug exported them: b.safetensors"),
        (link, "changed or removed since LoongPlug exported them: b.safetensors"),
        (link_folder, "changed or removed since LoongPlug exported them: templates/a.jinja"),
        (add, "did not write, under names that the export needs: c.safetensors"),
        (add_within, "did not write, under names that the export needs: templates/b.jinja"),
        (unlist, f"is not empty and is not an earlier export .* has no {MANIFEST_FILE}"),
        (damage, "cannot be used"),
        (climb, "not a file of the folder"),
    ],
)
def test_what_others_changed_is_refused_at_the_start_and_before_replacing(folder, change, words):
    change(folder)
    before = contents(folder)
    with pytest.raises(ValueError, match=words):
        check(folder)
    with pytest.raises(ValueError, match=words):
        export(folder, NEW)
    assert contents(folder) == before
    assert not (folder / HIDDEN).exists()


@pytest.mark.quick
def test_large_files_are_read_before_replacing_only(folder, monkeypatch):
    (folder / "a.safetensors").write_text("OLD A")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_READ_AT_START_BYTES", 4)
        check(folder)
    with pytest.raises(ValueError, match=r"changed .*a\.safetensors"):
        export(folder, NEW)
    assert contents(folder) == OLD | FOREIGN | {"a.safetensors": "OLD A"}


@pytest.mark.quick
@pytest.mark.parametrize("change", [edit, add])
def test_what_changes_while_an_export_is_built_is_refused(folder, change):
    with pytest.raises(ValueError, match=r"changed or removed|did not write"):
        export(folder, NEW, meanwhile=change)
    changed = {"config.json": "[]"} if change is edit else {"c.safetensors": "mine"}
    assert contents(folder) == OLD | FOREIGN | changed


@pytest.mark.quick
def test_other_folders_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"another kind \(model, not adapters\)"):
        check(folder, kind="adapters")
    with pytest.raises(ValueError, match="is a file"):
        check(folder / "README.md")
    (tmp_path / "empty").mkdir()
    for good in (tmp_path / "empty", tmp_path / "new"):
        check(good)
    assert not (tmp_path / "new").exists()


@pytest.mark.quick
@pytest.mark.parametrize("name", [HIDDEN, f"{HIDDEN}/new", f"{HIDDEN}/old"])
def test_what_is_behind_a_link_in_the_hidden_folder_s_place_stays(folder, tmp_path, name):
    for part in ("new", "old"):
        export(tmp_path / "elsewhere" / part, OLD)  # as in a replacement that was cut short
    before = contents(tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "elsewhere" / name.removeprefix(HIDDEN).strip("/"))
    for start in (check, lambda folder: export(folder, NEW)):
        with pytest.raises(ValueError, match=rf"cannot be written .*{name} is a link"):
            start(folder)
    assert contents(tmp_path) == before


@pytest.mark.quick
def test_two_exports_into_one_folder(folder):
    with pytest.raises(ValueError, match="Another run is writing an export"):
        export(folder, NEW, meanwhile=check)
    assert contents(folder) == OLD | FOREIGN


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
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    return lambda: done


@pytest.mark.quick
@pytest.mark.parametrize("earlier", [OLD, None], ids=["older-export", "new-folder"])
def test_killed_at_any_change_the_old_or_the_new_export_comes_out_whole(tmp_path, earlier):
    number, seen = 1, set()
    while True:
        folder = tmp_path / str(number) / "hf"
        if earlier is not None:
            export(folder, earlier)
            add_foreign(folder)
        kept = FOREIGN if earlier is not None else {}
        with pytest.MonkeyPatch.context() as patch:
            changes = kill_at(patch, number)
            with suppress(Killed):
                export(folder, NEW)
            if changes() < number:
                break
        if folder.exists():
            found = contents(folder)
            whole = [files for files in (earlier or {}, NEW) if files.items() <= found.items()]
            has_config = (folder / "config.json").exists()
            assert whole or not has_config, number  # no mixture passes for a model
            if not whole:
                assert is_half_replaced(folder)
        with pytest.MonkeyPatch.context() as patch:  # the next start is killed, too
            kill_at(patch, 2)
            with suppress(Killed):
                check(folder)
        check(folder)
        after = contents(folder) if folder.exists() else {}
        assert after in ((earlier or {}) | kept, NEW | kept), number
        seen.add(after.get("a.safetensors"))
        export(folder, NEW)
        assert contents(folder) == NEW | kept
        number += 1
    assert seen == {None if earlier is None else "old a", "new a"}
    assert number > 10


@pytest.mark.quick
@pytest.mark.parametrize("failing", range(1, 9))
def test_a_rename_that_fails_leaves_the_older_export(folder, monkeypatch, failing):
    rename, done = Path.rename, 0

    def fail(self: Path, target: Path) -> Any:
        nonlocal done
        done += 1
        if done == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        export(folder, NEW)
    assert contents(folder) == OLD | FOREIGN
    assert not is_half_replaced(folder)
    export(folder, NEW)
    assert contents(folder) == NEW | FOREIGN


@pytest.mark.quick
def test_a_file_that_came_into_the_way_of_a_cut_short_replacement_stays(folder):
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        kill_at(patch, 12)  # the older files have left, none has come
        export(folder, NEW)
    assert contents(folder / HIDDEN / "new").keys() == NEW.keys()
    assert is_half_replaced(folder)
    (folder / "c.safetensors").write_text("mine")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"did not write, under names .*c\.safetensors"):
            check(folder)
    (folder / "c.safetensors").unlink()
    check(folder)
    assert contents(folder) == NEW | FOREIGN


def on_ranks(rank: int, *, folder: Path, changed: bool) -> str:
    if changed and rank == 0:
        (folder / "b.safetensors").write_text("OLD B")
    dist.barrier()
    try:
        with replaced_files(folder, kind="model", rank=rank) as building:
            for name in sorted(NEW)[rank::3]:
                os.makedirs((building.folder / name).parent, exist_ok=True)
                (building.folder / name).write_text(NEW[name])
                building.digests[name] = f"{rank}" * 64
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("changed", [False, True])
def test_ranks_share_the_reading_and_end_together(folder, changed):
    told = run_ranks(on_ranks, 3, folder=folder, changed=changed)
    if changed:
        assert told == [told[0]] * 3
        assert "b.safetensors" in told[0]
        assert contents(folder) == OLD | FOREIGN | {"b.safetensors": "OLD B"}
        return
    assert told == [""] * 3
    assert contents(folder) == NEW | FOREIGN
    manifest = read_manifest(folder)
    assert manifest is not None
    assert [manifest.files[name].sha256[0] for name in sorted(NEW)] == [*"01201"]


@pytest.mark.quick
def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        export(tmp_path / "file" / "hf", NEW)
    assert os.listdir(tmp_path) == ["file"]
