"""What goes wrong in a phase of a step: one rank's exception, SIGTERM, and a built-in fault."""

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from compared_runs import before, exit_code, same, steps, train
from layout_flags import DP, FULL
from parity.gradient_faults import divide_by_the_replicas
from ranks import RankError, run_ranks

from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.exchange import AllToAll
from loongplug.models.decoder import TextDecoder
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run

pytestmark = pytest.mark.slow

MESSAGE = "this rank is unwell"

# Where an error or a signal comes from.
PHASES: dict[str, tuple[tuple[str, ...], type, str]] = {
    "full-1-encoder-forward": (FULL, EncoderOfStep, "payload"),
    "full-2-decoder": (FULL, TextDecoder, "forward"),
    "full-3-gradients-on-their-way": (FULL, AllToAll, "scatter_variable_shape_embeddings"),
    "dp-encoder-backward": (DP, EncoderOfStep, "backward"),
}


def failing(rank: int, *, flags: list[str], phase: str, store: str) -> None:
    """Rank 1's second call fails."""

    def fail() -> None:
        raise RuntimeError(MESSAGE)

    if rank == 1:
        before(*PHASES[phase][1:], fail, at=2)
    with failure_board(lambda timeout: dist.FileStore(store, 2)):
        run(flags)


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_one_rank_ends_all_with_its_message(flags, tmp_path, phase):
    with pytest.raises(RankError) as raised:
        run_ranks(
            failing,
            2,
            flags=[*flags, *PHASES[phase][0]],
            phase=phase,
            store=str(tmp_path / "store"),
            timeout=120.0,
        )
    text = str(raised.value)
    assert "still ran" not in text
    assert len(raised.value.errors) == 2
    assert text.count("loongplug: error") == 1
    assert f"loongplug: error [rank 1]: RuntimeError: {MESSAGE}" in text


def ended(rank: int, *, flags: list[str], phase: str, at: int) -> int | str | None:
    """How a run ends in which rank 0 gets SIGTERM."""
    if rank == 0:
        terminate = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        before(*PHASES[phase][1:], terminate, at=at)
    return exit_code(rank, flags=flags)


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """Uninterrupted runs of both modes."""
    return {mode: train(flags, *mode, ranks=2) for mode in (FULL, DP)}


@pytest.mark.parametrize("phase", ["full-2-decoder", "dp-encoder-backward"])
def test_sigterm_in_a_phase_saves_and_ends_all(flags, whole, tmp_path, phase):
    """In the second step, whose four microbatches two ranks share, two each."""
    mode = PHASES[phase][0]
    at = 4 + 2 if phase == "full-2-decoder" else 2 + 1
    save = [*flags, *mode, "--save", str(tmp_path)]
    assert run_ranks(ended, 2, flags=save, phase=phase, at=at, timeout=120.0) == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert train(save, "--load", str(tmp_path), ranks=2) == whole[mode][2:]


@pytest.fixture(scope="module")
def compared(flags, weights):
    """Flags of a run of one step, and what the single rank makes of it."""
    run = [*flags, "--load-hf", weights, "--train-iters", "1"]
    return run, train(run)


@pytest.mark.parametrize(
    "mode", [pytest.param(DP, id="dp"), pytest.param(FULL, id="full", marks=pytest.mark.quick)]
)
def test_without_a_fault_they_agree(compared, mode):
    flags, expected = compared
    assert same(train(flags, *mode, "--micro-batch-size", "1", ranks=2), expected)


def divided(rank: int, *, flags: list[str]) -> Any:
    divide_by_the_replicas(rank)
    return steps(rank, flags=flags)


@pytest.mark.quick
def test_a_wrong_factor_shows_in_the_norm(compared):
    flags, ((expected_loss, expected_norm),) = compared
    flags = [*flags, *FULL, "--micro-batch-size", "1"]
    ((loss, norm),) = run_ranks(divided, 2, flags=flags, timeout=120.0)[0]
    assert abs(loss / expected_loss - 1) < 1e-5
    assert abs(norm / expected_norm - 1) > 1e-4
