"""Whole runs with an encoder in pipeline stages: what they save goes on, there and elsewhere."""

import shutil

import pytest
from compared_runs import train

from loongplug.checkpoint.export_folder import EXPORT_LIST

pytestmark = pytest.mark.slow

ENCODER = "model.image_encoder"
STAGED = (f"{ENCODER}.rank_offset=1", f"{ENCODER}.pipeline_model_parallel_size=2")
SAVED_AFTER = 1
STEPS = 2


@pytest.fixture(scope="module")
def run_staged(flags, weights, tmp_path_factory):
    """Flags from the same weights on, the steps of three ranks, and their checkpoint half-way."""
    folder = tmp_path_factory.mktemp("staged")
    flags = [*flags, "--load-hf", weights, "--train-iters", str(STEPS)]
    flags += ["--lr-decay-style", "constant", "--clip-grad", "0.5"]
    saving = ("--save", str(folder / "run"), "--save-interval", str(SAVED_AFTER))
    # Timers of a kind that only the decoder has, some with a barrier unless told otherwise.
    more = (*saving, "--save-hf", str(folder / "export"), "--timing-log-level", "2")
    steps = train(flags, *STAGED, *more, ranks=3)
    shutil.copytree(folder / "run", folder / "end")
    for left in (folder / "run").glob(f"iter_{STEPS:07d}"):
        shutil.rmtree(left)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AFTER))
    return flags, steps, folder


def test_it_goes_on_bit_by_bit(run_staged, tmp_path):
    flags, steps, folder = run_staged
    more = ("--load", str(folder / "run"), "--save-hf", str(tmp_path / "export"))
    assert train(flags, *STAGED, *more, ranks=3) == steps[SAVED_AFTER:]
    exported = [each / "model.safetensors" for each in (tmp_path / "export", folder / "export")]
    first, second = (each.read_bytes() for each in exported)
    assert first == second


def test_its_last_checkpoint_is_exported_to_the_same_bytes_without_stages(run_staged, tmp_path):
    """Where steps go on in another placement, sums are in another order; what is saved is not."""
    flags, _, folder = run_staged
    more = ("--load", str(folder / "end"), "--save-hf", str(tmp_path / "export"))
    assert train(flags, *more) == []
    found, expected = (
        {
            file.relative_to(export): file.read_bytes()
            for file in export.rglob("*")
            if file.is_file() and file.name != EXPORT_LIST  # which has times
        }
        for export in (tmp_path / "export", folder / "export")
    )
    assert found == expected
    assert any(file.suffix == ".safetensors" for file in found)
