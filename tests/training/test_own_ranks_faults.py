"""Something goes wrong in a run with the encoder on a rank of its own: all ranks hear of it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from compared_runs import before, exit_code, train
from ranks import RankError, run_ranks
from sweeps import sweep

from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.wire import Wire
from loongplug.models.decoder import TextDecoder
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run

pytestmark = pytest.mark.slow

# Two stages of the decoder, of which the second never talks to the encoder.
APART = ("--pipeline-model-parallel-size", "2", "model.image_encoder.rank_offset=2")
RANKS, ENCODER = 3, 2
MESSAGE = "this rank is unwell"
ENDED_WITHIN = 60.0  # seconds after the rank has gone; beside other work, ranks take their time
PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")

# What a rank is about to do: its number, and the call.
MOMENTS: dict[str, tuple[int, type, str]] = {
    "encoder-forward": (ENCODER, EncoderOfStep, "payload"),
    "encoder-takes-gradients": (ENCODER, Wire, "receive"),
    "decoder-takes-features": (0, Wire, "receive"),
    "decoder-sends-gradients": (0, Wire, "send"),
    "decoder-last-stage": (1, TextDecoder, "forward"),
}
FEW = ("encoder-forward", "decoder-last-stage")


def goes(rank: int, *, flags: list[str], moment: str, how: str, folder: Path) -> None:
    """One rank goes in the second step, whose first microbatch is the fifth."""

    def go() -> None:
        (folder / "gone").touch()
        if how == "raises":
            raise RuntimeError(MESSAGE)
        os.kill(os.getpid(), signal.SIGKILL)

    victim, owner, method = MOMENTS[moment]
    if rank == victim:
        before(owner, method, go, at=5)
    with failure_board(lambda timeout: dist.FileStore(str(folder / "store"), RANKS)):
        run(flags)


def gone(flags: list[str], folder: Path, *, moment: str, how: str) -> RankError:
    """How the ranks end, in good time."""
    given = {"flags": [*flags, *APART], "moment": moment, "how": how, "folder": folder}
    with pytest.raises(RankError) as raised:
        run_ranks(goes, RANKS, timeout=200.0, **given)
    assert time.time() - (folder / "gone").stat().st_mtime < ENDED_WITHIN
    assert "still ran" not in str(raised.value)
    assert raised.value.errors.keys() == set(range(RANKS))
    return raised.value


@pytest.mark.parametrize("moment", sweep(MOMENTS, but=FEW))
def test_a_killed_rank_ends_all_with_a_message(flags, tmp_path, moment):
    ended = gone(flags, tmp_path, moment=moment, how="is killed")
    victim, *_ = MOMENTS[moment]
    assert ended.errors.pop(victim) == "was killed by signal SIGKILL"
    assert all("exited with code 1" in said for said in ended.errors.values())
    told = [line for line in str(ended).splitlines() if "loongplug: error [rank" in line]
    assert 1 <= len(told) <= RANKS - 1
    assert all(any(text in line for text in PEER_IS_GONE) for line in told), told


@pytest.mark.parametrize("moment", sweep(MOMENTS, but=("decoder-takes-features",)))
def test_an_exception_in_one_rank_ends_all_with_its_message(flags, tmp_path, moment):
    ended = str(gone(flags, tmp_path, moment=moment, how="raises"))
    assert ended.count("loongplug: error") == 1
    assert f"loongplug: error [rank {MOMENTS[moment][0]}]: RuntimeError: {MESSAGE}" in ended


def ended(rank: int, *, flags: list[str], moment: str) -> int | str | None:
    """How a run ends in which one rank gets SIGTERM in the second step."""
    victim, owner, method = MOMENTS[moment]
    if rank == victim:
        before(owner, method, lambda: os.kill(os.getpid(), signal.SIGTERM), at=5)
    return exit_code(rank, flags=flags)


@pytest.mark.parametrize("moment", sweep(MOMENTS, but=("encoder-takes-gradients",)))
def test_sigterm_saves_and_ends_all(flags, tmp_path, moment):
    save = [*flags, *APART, "--save", str(tmp_path)]
    assert run_ranks(ended, RANKS, flags=save, moment=moment, timeout=200.0) == [0] * RANKS
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    whole = train([*flags, *APART], ranks=RANKS)
    assert train(save, "--load", str(tmp_path), ranks=RANKS) == whole[2:]
