"""A data loading process that is killed within a whole run: one sentence, and no rank hangs."""

import multiprocessing
import os
import signal

import pytest
import torch.distributed as dist
from layout_flags import TP2_PP2
from ranks import RankError, run_ranks

from loongplug.data.loader import MicrobatchLoader
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run

SENTENCE = "A data loading process has died"


KILLER = 3  # of the last stage, which loads no media


def kill_one(rank: int, *, flags: list[str], store: str) -> None:
    """Train; before the second step a rank kills its processes that load data."""
    original = MicrobatchLoader.__next__
    taken = 0

    def next_microbatch(self: MicrobatchLoader):
        nonlocal taken
        taken += 1
        if rank == KILLER and taken == 5:  # four to a step
            children = sorted(multiprocessing.active_children(), key=lambda child: child.pid or 0)
            for child in children[-2:]:  # one that makes an index may be older
                os.kill(child.pid, signal.SIGKILL)
        return original(self)

    MicrobatchLoader.__next__ = next_microbatch
    with failure_board(lambda timeout: dist.FileStore(store, dist.get_world_size())):
        run(flags)


@pytest.mark.slow
def test_it_is_one_sentence_and_no_hang(flags, tmp_path):
    workers = ("--num-workers", "2", "--train-iters", "200", *TP2_PP2)
    with pytest.raises(RankError) as raised:
        run_ranks(
            kill_one,
            4,
            flags=[*flags, *workers],
            store=str(tmp_path / "store"),
            timeout=200.0,
        )
    errors = raised.value.errors
    assert len(errors) == 4
    text = str(raised.value)
    assert "still ran" not in text
    assert "no report within" not in text
    assert text.count("loongplug: error") == 1, text
    assert f"loongplug: error [rank {KILLER}]: ProcessDiedError: {SENTENCE}" in text
    assert "--num-workers" in text
