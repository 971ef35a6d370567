"""Asynchronous saves on CPU ranks: what is written is the state at the save, and whole."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.training.run import run

STEPS = 3
RANKS = 2

Writer = Callable[[int, int], None]  # with the rank and the iteration


def train(rank: int, *, flags: list[str], folder: Path, writer: Writer | None = None) -> int:
    """Run with ``writer`` called in the process that writes; returns the number of steps."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.write_preloaded_data
    trainer = os.getpid()

    def write(transforms: Any, *args: Any, **kwargs: Any) -> Any:
        if writer is not None:
            assert os.getpid() != trainer
            os.chdir(folder)
            writer(rank, int(re.findall(r"iter_(\d+)", str(kwargs["write_bucket"][0]))[0]))
        return original(transforms, *args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    flags = [*flags, "--save", str(folder / "ckpt"), "--load", str(folder / "ckpt")]
    return len(run(flags, on_report=lambda step: (folder / f"step_{step.iteration}").touch()))


def after_the_next_step(rank: int, iteration: int) -> None:
    """Let training go on first, and look whether the tracker waits for this write."""
    # Forever, and so until the bound of the ranks, where training waits for the writer.
    while iteration < STEPS and not Path(f"step_{iteration + 1}").exists():
        time.sleep(0.01)
    tracker = Path("ckpt") / TRACKER
    assert not tracker.exists() or int(tracker.read_text()) < iteration


def raises(rank: int, iteration: int) -> None:
    if (rank, iteration) == (1, 2):
        raise OSError("no space left")


def dies(rank: int, iteration: int) -> None:
    if (rank, iteration) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def flags(run_flags):
    return [*run_flags, "--train-iters", str(STEPS), "--save-interval", "1"]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint)
    state: Any = {
        name: torch.empty(described.size, dtype=described.properties.dtype)
        for name, described in reader.read_metadata().state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.slow
def test_training_goes_on_while_the_state_of_the_save_is_written(flags, tmp_path):
    more = ("--use-distributed-optimizer", "--bf16")
    for name, asynchronous, writer in (
        ("in-step", (), None),
        ("async", ("--async-save",), after_the_next_step),
    ):
        (tmp_path / name).mkdir()
        run_ranks(
            *(train, RANKS),
            flags=[*flags, *more, *asynchronous],
            folder=tmp_path / name,
            writer=writer,
        )
    assert (tmp_path / "async" / "ckpt" / TRACKER).read_text() == str(STEPS)
    before: dict[str, torch.Tensor] = {}
    for iteration in range(1, STEPS + 1):
        in_step, asynchronous = (
            tensors(tmp_path / name / "ckpt" / f"iter_{iteration:07d}")
            for name in ("in-step", "async")
        )
        assert in_step.keys() == asynchronous.keys()
        assert all(torch.equal(in_step[name], asynchronous[name]) for name in in_step)
        moved = [name for name, value in before.items() if not torch.equal(value, in_step[name])]
        assert not before or len(moved) > len(before) / 2  # a later state would have shown
        before = in_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "words"), [(raises, "OSError: no space left"), (dies, "its writer has died")]
)
def test_a_failed_writer_ends_all_ranks_and_leaves_the_last_checkpoint(
    flags, tmp_path, writer, words
):
    with pytest.raises(RankError) as raised:
        run_ranks(*(train, RANKS), flags=[*flags, "--async-save"], folder=tmp_path, writer=writer)
    assert len(raised.value.errors) == RANKS
    for error in raised.value.errors.values():
        assert f"The checkpoint cannot be written. rank 1: {words}" in error
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "1"
    assert not (tmp_path / "ckpt" / "iter_0000002" / ".metadata").exists()
    steps = run_ranks(train, RANKS, flags=[*flags, "--async-save"], folder=tmp_path)
    assert steps == [STEPS - 1] * RANKS
