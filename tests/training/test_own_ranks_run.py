"""Whole runs with the encoder on a rank of its own: what they save goes on anywhere."""

import shutil

import pytest
from compared_runs import same, train

pytestmark = pytest.mark.slow

APART = ("model.image_encoder.rank_offset=1",)
SAVED_AFTER = 2
STEPS = 4


@pytest.fixture(scope="module")
def run_apart(flags, tmp_path_factory):
    """Flags from the same weights on, the steps of two ranks, and their checkpoint half-way."""
    folder = tmp_path_factory.mktemp("apart")
    train(flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(folder / "weights"))
    flags = [*flags, "--load-hf", str(folder / "weights"), "--train-iters", str(STEPS)]
    flags += ["--lr-decay-style", "constant", "--clip-grad", "0.5"]
    saving = ("--save", str(folder / "run"), "--save-interval", str(SAVED_AFTER))
    # Timers of a kind that only the decoder has, some with a barrier unless told otherwise.
    more = (*saving, "--save-hf", str(folder / "export"), "--timing-log-level", "2")
    steps = train(flags, *APART, *more, ranks=2)
    for left in (folder / "run").glob(f"iter_{STEPS:07d}"):
        shutil.rmtree(left)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AFTER))
    return flags, steps, folder


def test_steps_are_those_of_one_rank(run_apart):
    flags, steps, _ = run_apart
    assert same(steps, train(flags))


@pytest.mark.sweep  # as of an encoder in stages, whose runs are in test_encoder_stages_run.py
def test_it_goes_on_bit_by_bit(run_apart, tmp_path):
    flags, steps, folder = run_apart
    more = ("--load", str(folder / "run"), "--save-hf", str(tmp_path / "export"))
    assert train(flags, *APART, *more, ranks=2) == steps[SAVED_AFTER:]
    exported = [each / "model.safetensors" for each in (tmp_path / "export", folder / "export")]
    first, second = (each.read_bytes() for each in exported)
    assert first == second


@pytest.mark.sweep
def test_it_goes_on_where_the_encoder_lies_with_the_decoder(run_apart, tmp_path):
    flags, steps, folder = run_apart
    saving = ("--save", str(tmp_path / "run"), "--save-interval", "1")
    together = train(flags, "--load", str(folder / "run"), *saving)
    assert same(together, steps[SAVED_AFTER:])
    # And back, with the optimizer's state of the step between.
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AFTER + 1))
    back = train(flags, *APART, "--load", str(tmp_path / "run"), ranks=2)
    assert same(back, steps[SAVED_AFTER + 1 :])
