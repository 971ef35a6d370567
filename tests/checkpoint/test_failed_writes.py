"""What the writers of one rank leave for it, and what all ranks hear of a failure."""

import errno
import gc
import weakref
from queue import Queue
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from ranks import run_ranks
from torch.distributed.checkpoint import CheckpointException

from loongplug.checkpoint.failed_writes import told_to_all, write_buckets


@pytest.fixture
def written(monkeypatch):
    """What ``write_buckets`` leaves in the queue when its writer gives this for each bucket."""

    def of(*results: object) -> object:
        def write(transforms, *, local_proc_idx, write_bucket, **options):
            if isinstance(write_bucket, ZeroDivisionError):
                raise write_bucket
            return local_proc_idx, write_bucket

        monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
        queue: Queue = Queue()
        write_buckets([], False, 0, results, queue)
        return queue.get_nowait()

    return of


@pytest.mark.quick
def test_results_come_by_number(written):
    assert written(["a"], ["b"], []) == {0: ["a"], 1: ["b"], 2: []}


@pytest.mark.quick
def test_errors_keep_their_words_and_are_said_once(written):
    full = [OSError(errno.ENOSPC, "No space left on device") for _ in range(2)]
    error = written(full[0], ["b"], full[1], ZeroDivisionError("raised"))
    words = "OSError: [Errno 28] No space left on device; ZeroDivisionError: raised"
    assert isinstance(error, RuntimeError)
    assert str(error) == words


class Open:
    """What a frame has open."""


@pytest.mark.quick
def test_what_a_failed_writer_had_open_goes_before_the_collector_comes(monkeypatch):
    """In what order that would end a file and torch's writer to it, nobody knows: ranks crashed."""
    held: list[weakref.ref[Open]] = []

    def write(transforms, *, local_proc_idx, **options):
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
        write_buckets([], False, 0, [None, None], queue)
        assert [stream() for stream in held] == [None, None]
    finally:
        monkeypatch.undo()
        gc.enable()
    assert str(queue.get_nowait()) == "OSError: [Errno 28] No space left on device"


def finalized(rank: int, *, failed: int | None) -> str:
    """What rank ``rank`` hears when the writer of rank ``failed`` could not write."""

    def finalize(writer, metadata, dist_wrapper):
        if failed is not None:
            reason = RuntimeError("Worker failure: OSError: full")
            raise CheckpointException("write", {failed: (reason, None)} if rank == 0 else {})

    wrapper = SimpleNamespace(coordinator_rank=0, group=dist.group.WORLD)
    try:
        told_to_all(finalize)(None, None, wrapper)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.quick
@pytest.mark.parametrize("failed", [None, 1])
def test_all_ranks_hear_the_same(failed):
    words = "" if failed is None else "The checkpoint cannot be written. rank 1: OSError: full"
    assert run_ranks(finalized, 2, failed=failed) == [words] * 2
