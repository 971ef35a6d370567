"""The folder of a checkpoint: put in place, put back, cleared; what is said of a failed write."""

import errno
import functools
import gc
import weakref
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from ranks import RankError, run_ranks

from loongplug.checkpoint.atomic_saves import (
    AtomicSaves,
    put_in_place,
    recover,
    remove_left_overs,
    write_buckets,
)


def folder(path: Path, content: str | None = None) -> Path:
    path.mkdir(parents=True)
    if content is not None:
        (path / "metadata.json").write_text(content)
    return path


def content(path: Path) -> str:
    return (path / "metadata.json").read_text()


@pytest.mark.quick
@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
@pytest.mark.parametrize("meanwhile", ["nothing", "an empty folder"])
def test_the_old_or_the_new_checkpoint_is_there_whenever_it_is_killed(
    tmp_path, monkeypatch, killed_at, meanwhile
):
    """A process that is killed does nothing more: each rename and removal may be the last."""
    final = folder(tmp_path / "iter_0000002", "old")
    partial = folder(tmp_path / ".saving_iter_0000002_1", "new")
    done = 0

    def step(original: Any, *args: Any) -> Any:
        nonlocal done
        done += 1
        if done >= killed_at:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", functools.partialmethod(step_of(Path.rename, step)))
        patched.setattr(
            "loongplug.checkpoint.atomic_saves.shutil.rmtree",
            functools.partial(step, lambda path: None),
        )
        try:
            put_in_place(partial, final)
        except KeyboardInterrupt:
            assert killed_at < 4
    if meanwhile == "an empty folder" and not final.exists():
        final.mkdir()  # as Megatron makes it at the start of the next save
    recover(tmp_path)
    recover(tmp_path)  # as every rank does
    assert content(final) == ("old" if killed_at < 3 else "new")
    remove_left_overs(tmp_path, keep=set())
    assert list(tmp_path.iterdir()) == [final]


def step_of(original: Any, step: Any) -> Any:
    return lambda self, *args: step(original, self, *args)


@pytest.mark.quick
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    elsewhere = folder(tmp_path / "elsewhere", "old")
    final = tmp_path / "run" / "iter_0000002"
    final.parent.mkdir()
    final.symlink_to(elsewhere)
    put_in_place(folder(tmp_path / "run" / ".saving_iter_0000002_1", "new"), final)
    assert (content(final), content(elsewhere)) == ("new", "old")
    assert list(final.parent.iterdir()) == [final]


@pytest.mark.quick
def test_what_others_put_beside_a_checkpoint_stays(tmp_path):
    """Into its folder, or beside it under names that begin as ours do."""
    final = folder(tmp_path / "iter_0000002", "old")
    (final / "__0_0.distcp").touch()
    (final / "notes.md").write_text("mine")
    folder(final / "eval_results", "mine")
    for name in (".saving_the_best", ".replaced_cover", "cover"):
        folder(tmp_path / name, "mine")
    put_in_place(folder(tmp_path / ".saving_iter_0000002_1", "new"), final)
    recover(tmp_path)
    remove_left_overs(tmp_path, keep=set())
    assert content(final) == "new"
    assert sorted(path.name for path in final.iterdir()) == [
        *("eval_results", "metadata.json", "notes.md")
    ]
    assert content(final / "eval_results") == "mine"
    assert all(content(tmp_path / n) == "mine" for n in (".saving_the_best", ".replaced_cover"))


@pytest.mark.quick
def test_saves_under_way_are_no_left_overs(tmp_path):
    mine, other = (folder(tmp_path / f".saving_iter_000000{n}_1", "part") for n in (1, 2))
    aside = folder(tmp_path / ".replaced_iter_0000003", "the only one")
    remove_left_overs(tmp_path, keep={mine})
    assert mine.exists()
    assert not other.exists()
    assert aside.exists()
    recover(tmp_path)
    assert content(tmp_path / "iter_0000003") == "the only one"


@pytest.mark.quick
def test_a_folder_that_was_removed_or_replaced_takes_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    lock = tmp_path / "run" / ".loongplug_lock"
    folder(lock.parent, "mine")
    lock.touch()
    saves = AtomicSaves(lock=lock)
    assert saves._begin(lock.parent / "iter_0000001").is_dir()
    lock.parent.rename(tmp_path / "moved")
    lock.parent.mkdir()
    with pytest.raises(ValueError, match="run was removed or replaced since the run started"):
        saves._begin(lock.parent / "iter_0000002")
    assert not [*lock.parent.iterdir()]


def save_twice(rank: int, *, save: Path, fail: bool) -> list[str]:
    """Two asynchronous saves under way at once, finished in order; where each was written."""
    written = []

    class Request:
        def __init__(self) -> None:
            self.finalize_fns: list[Any] = []

        def add_finalize_fn(self, function: Any) -> None:
            self.finalize_fns.append(function)

    def original(state: Any, checkpoint_dir: str) -> Request:
        written.append(checkpoint_dir)
        if rank == 0:
            (Path(checkpoint_dir) / "metadata.json").write_text(str(state))
        return Request()

    if fail and rank == 0:
        save.write_text("in the way")
    wrapped = AtomicSaves().wrap(original)
    requests = [wrapped(n, str(save / f"iter_000000{n}")) for n in (1, 2)]
    assert not any((save / f"iter_000000{n}").exists() for n in (1, 2))
    dist.barrier()  # the other rank has looked, too
    for request in requests:
        for function in request.finalize_fns:
            function()
    return written


def test_all_ranks_write_into_the_same_new_folder(tmp_path):
    first, second = run_ranks(save_twice, 2, save=tmp_path / "run", fail=False)
    assert first == second
    assert len({Path(name).name for name in first}) == 2
    assert [content(tmp_path / "run" / f"iter_000000{n}") for n in (1, 2)] == ["1", "2"]
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_told_to_all_ranks(tmp_path):
    with pytest.raises(RankError, match="cannot make a folder for the checkpoint") as raised:
        run_ranks(save_twice, 2, save=tmp_path / "run", fail=True)
    assert len(raised.value.errors) == 2


class Open:
    """What a frame has open."""


@pytest.mark.quick
def test_what_a_failed_writer_had_open_goes_before_the_collector_comes(monkeypatch):
    """In what order that would end a file and torch's writer to it, nobody knows: ranks crashed.

    Errors keep their words, and are said once.
    """
    held: list[weakref.ref[Open]] = []

    def write(transforms, *, local_proc_idx, write_bucket, **options):
        if write_bucket is not None:
            return local_proc_idx, write_bucket
        stream = Open()
        held.append(weakref.ref(stream))
        try:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise RuntimeError("cannot be written") from error
        except Exception as error:
            result = local_proc_idx, error  # as upstream: the frame keeps what keeps the frame
        return result

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
    monkeypatch.setattr("gc.enable", lambda: None)
    queue: Queue = Queue()
    try:
        write_buckets([], False, 0, [None, ["b"], None], queue)
        assert [stream() for stream in held] == [None, None]
    finally:
        monkeypatch.undo()
        gc.enable()
    assert str(queue.get_nowait()) == "OSError: [Errno 28] No space left on device"
