"""What the writers of one rank leave for it, and what all ranks hear of a failure."""

import errno
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


def finalized(rank: int, *, failed: int | None) -> str:
    """What rank ``rank`` hears when the writer of rank ``failed`` could not write."""

    def finalize(writer, metadata, dist_wrapper):
        if failed is not None:
            reason = RuntimeError("Worker failure: OSError: full")
            raise CheckpointException("write", {failed: (reason, None)} if rank == 0 else {})

    wrapper = SimpleNamespace(coordinator_rank=0, group=dist.group.WORLD)
    try:
        told_to_all(finalize)(None, None, wrapper)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.quick
@pytest.mark.parametrize("failed", [None, 1])
def test_all_ranks_hear_the_same(failed):
    words = "" if failed is None else "The checkpoint cannot be written. rank 1: OSError: full"
    assert run_ranks(finalized, 2, failed=failed) == [words] * 2
