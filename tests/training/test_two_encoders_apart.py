"""Two encoders on ranks of their own: media that either cannot load."""

import json

import pytest
from compared_runs import first_weights, same, train
from seen_and_heard import flags_of

pytestmark = pytest.mark.slow

APART = ("model.image_encoder.rank_offset=1", "model.audio_encoder.rank_offset=2")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Flags of a run from given weights, in which an image and a sound are damaged; its steps."""
    folder = tmp_path_factory.mktemp("damaged")
    flags = [*flags_of(folder / "data", damaged=True), "--bad-sample", "skip"]
    flags += ["--load-hf", first_weights(flags, folder / "weights")]
    return flags, train(flags, "--metrics-json", str(folder / "alone.json")), folder


def test_damaged_media_of_either_are_left_out(damaged, tmp_path):
    flags, alone, folder = damaged
    metrics = tmp_path / "apart.json"
    steps = train(flags, *APART, "--metrics-json", str(metrics), ranks=3)
    assert same(steps, alone), (steps, alone)
    found, expected = (
        json.loads(file.read_text())["bad_samples"] for file in (metrics, folder / "alone.json")
    )
    assert found == expected
    assert found["pixels"] == 2
