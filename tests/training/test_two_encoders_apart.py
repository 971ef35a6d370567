"""Two encoders on ranks of their own: media that either cannot load, and a signal to one."""

import json
import os
import signal

import pytest
from compared_runs import before, exit_code, first_weights, same, train
from ranks import run_ranks
from seen_and_heard import flags_of

from loongplug.hetero.encoder_of_step import EncoderOfStep

pytestmark = pytest.mark.slow

APART = ("model.image_encoder.rank_offset=1", "model.audio_encoder.rank_offset=2")
RANKS, HEARS = 3, 2
# The image encoder in two stages, and two ranks that hear.
STAGED = (
    *("model.image_encoder.rank_offset=1", "model.image_encoder.pipeline_model_parallel_size=2"),
    *("model.audio_encoder.rank_offset=3", "model.audio_encoder.data_parallel_size=2"),
)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Flags of a run from given weights, in which an image and a sound are damaged; its steps."""
    folder = tmp_path_factory.mktemp("damaged")
    flags = [*flags_of(folder / "data", damaged=True), "--bad-sample", "skip"]
    flags += ["--load-hf", first_weights(flags, folder / "weights")]
    return flags, train(flags, "--metrics-json", str(folder / "alone.json")), folder


@pytest.mark.parametrize(
    ("layout", "ranks"), [(APART, RANKS), pytest.param(STAGED, 5, marks=pytest.mark.sweep)]
)
def test_damaged_media_of_either_are_left_out(damaged, tmp_path, layout, ranks):
    flags, alone, folder = damaged
    metrics = tmp_path / "apart.json"
    steps = train(flags, *layout, "--metrics-json", str(metrics), ranks=ranks)
    assert same(steps, alone), (steps, alone)
    found, expected = (
        json.loads(file.read_text())["bad_samples"] for file in (metrics, folder / "alone.json")
    )
    assert found == expected
    assert found["pixels"] == 2


def ended(rank: int, *, flags: list[str]) -> int | str | None:
    """How a run ends in which the rank that hears gets SIGTERM in the first of two steps."""
    if rank == HEARS:
        before(EncoderOfStep, "payload", lambda: os.kill(os.getpid(), signal.SIGTERM), at=1)
    return exit_code(rank, flags=flags)


@pytest.mark.sweep
def test_sigterm_at_one_of_them_saves_and_ends_all(tmp_path):
    flags = [*flags_of(tmp_path / "data"), *APART]
    save = [*flags, "--save", str(tmp_path / "run")]
    assert run_ranks(ended, RANKS, flags=save, timeout=200.0) == [0] * RANKS
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    whole = train(flags, ranks=RANKS)
    assert train(save, "--load", str(tmp_path / "run"), ranks=RANKS) == whole[1:]
