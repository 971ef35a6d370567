"""What goes wrong in a phase of a step: one rank's exception, SIGTERM, and built-in faults."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from compared_runs import before, exit_code, first_weights, same, steps, train
from parity.gradient_faults import divide_by_the_replicas
from parity.mutations import (
    drop_deepstack_gradients,
    finalize_too_early,
    no_padding,
    swap_two_units,
)
from ranks import RankError, run_ranks
from sweeps import sweep

from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.exchange import AllToAll
from loongplug.models.decoder import TextDecoder
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run

pytestmark = pytest.mark.slow

DP = ("--enable-encoder-hetero-dp", "--tensor-model-parallel-size", "2")
FULL = (
    "--enable-full-hetero-dp",
    "--full-hetero-dp-schedule",
    "separated",
    "--pipeline-model-parallel-size",
    "2",
)
MESSAGE = "this rank is unwell"

# Where an error or a signal comes from.
PHASES: dict[str, tuple[tuple[str, ...], type, str]] = {
    "full-1-encoder-forward": (FULL, EncoderOfStep, "payload"),
    "full-1-features-on-their-way": (FULL, AllToAll, "gather_variable_shape_embeddings"),
    "full-2-decoder": (FULL, TextDecoder, "forward"),
    "full-3-gradients-on-their-way": (FULL, AllToAll, "scatter_variable_shape_embeddings"),
    "full-3-encoder-backward": (FULL, EncoderOfStep, "backward"),
    "dp-encoder-forward": (DP, EncoderOfStep, "payload"),
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


FAILING_PHASES = (
    *("full-1-encoder-forward", "full-2-decoder", "full-3-gradients-on-their-way"),
    "dp-encoder-backward",
)


@pytest.mark.parametrize("phase", sweep(PHASES, but=FAILING_PHASES))
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


SIGTERM_PHASES = (
    "full-1-encoder-forward",
    "full-2-decoder",
    "full-3-encoder-backward",
    "dp-encoder-backward",
)


@pytest.mark.parametrize(
    "phase", sweep(SIGTERM_PHASES, but=("full-2-decoder", "dp-encoder-backward"))
)
def test_sigterm_in_a_phase_saves_and_ends_all(flags, whole, tmp_path, phase):
    """In the second step, whose four microbatches two ranks share, two each."""
    mode = PHASES[phase][0]
    at = 4 + 2 if phase == "full-2-decoder" else 2 + 1
    save = [*flags, *mode, "--save", str(tmp_path)]
    assert run_ranks(ended, 2, flags=save, phase=phase, at=at, timeout=120.0) == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert train(save, "--load", str(tmp_path), ranks=2) == whole[mode][2:]


def mutated(rank: int, *, flags: list[str], mutation: Callable[[int], None]) -> Any:
    mutation(rank)
    return steps(rank, flags=flags)


@pytest.fixture(scope="module")
def compared(flags, tmp_path_factory):
    """Flags of a run of one step, and what the single rank makes of it."""
    weights = first_weights(flags, tmp_path_factory.mktemp("weights") / "hf")
    run = [*flags, "--load-hf", weights, "--train-iters", "1"]
    return run, train(run)


@pytest.mark.parametrize(
    "mode", [pytest.param(DP, id="dp"), pytest.param(FULL, id="full", marks=pytest.mark.quick)]
)
def test_without_a_fault_they_agree(compared, mode):
    flags, expected = compared
    assert same(train(flags, *mode, "--micro-batch-size", "1", ranks=2), expected)


@pytest.mark.parametrize(
    ("mode", "mutation", "loss_differs"),
    [
        (DP, divide_by_the_replicas, False),
        pytest.param(FULL, divide_by_the_replicas, False, marks=pytest.mark.quick),
        pytest.param(DP, swap_two_units, True, marks=pytest.mark.sweep),
        (FULL, swap_two_units, True),
        pytest.param(DP, drop_deepstack_gradients, False, marks=pytest.mark.sweep),
        (FULL, drop_deepstack_gradients, False),
        (FULL, finalize_too_early, False),
    ],
)
def test_a_fault_shows(compared, mode, mutation, loss_differs):
    flags, expected = compared
    flags = [*flags, *mode, "--micro-batch-size", "1"]
    found = run_ranks(mutated, 2, flags=flags, mutation=mutation, timeout=120.0)
    ((loss, norm),) = found[0]
    ((expected_loss, expected_norm),) = expected
    assert (abs(loss / expected_loss - 1) > 1e-5) == loss_differs
    assert abs(norm / expected_norm - 1) > 1e-4


def test_a_rank_without_units_that_skips_its_encoder_shows(compared, demo, tmp_path):
    """With one microbatch, of text alone, to a step: images would be shared."""
    flags, _ = compared
    rows = (demo / "train.jsonl").read_text().splitlines()
    text = [row for row in rows if '"image"' not in row and '"video"' not in row]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(text))
    one_unit = (*FULL, "--micro-batch-size", "8", "--overlap-grad-reduce", "--train-iters", "2")
    one_unit += ("--train-data-path", str(data))
    with pytest.raises(RankError, match=r"(?s)Communication call has not been issued"):
        run_ranks(mutated, 2, flags=[*flags, *one_unit], mutation=no_padding, timeout=120.0)
