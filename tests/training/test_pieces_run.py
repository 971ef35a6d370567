"""Whole runs in which several replicas share a microbatch's images, against the single rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from compared_runs import Steps, same, steps, train
from cut_images import cut
from digits.sounds import make_sound_data
from layout_flags import BALANCED, DP, FULL, OVERLAP, SP, TP2
from PIL import Image

from loongplug.hetero.executor import Executor

pytestmark = pytest.mark.slow

OFFLOADS = (
    *("--full-hetero-dp-cpu-offload", "--offload-encoder-activations", "--offload-encoder-state"),
)
ALL_IN_ONE = ("--micro-batch-size", "8")
# Of the eight rows of a step, in pixels: one row has most of the images, of three sizes.
IMAGES = {1: [(32, 32)], 2: [(96, 64), *[(64, 64)] * 4, (32, 64)], 5: [(64, 64)], 6: [(32, 32)]}
# Ranks and flags. Without balance, what is left at a step's end is cut. The parity matrix has more.
CASES = {
    "full-tp2-balanced-sp": (4, (*FULL, *TP2, SP, *BALANCED)),
    "full-one-unit-offloads": (2, (*FULL, *ALL_IN_ONE, *OFFLOADS)),
    "dp-one-unit-sp": (2, (*DP, *ALL_IN_ONE, SP, *OVERLAP)),
}


def rows(folder: Path) -> list[str]:
    """Eight rows, of which one has most of the images."""
    lines = []
    for number in range(8):
        parts = []
        for index, pixels in enumerate(IMAGES.get(number, ())):
            image = folder / f"{number}-{index}.png"
            Image.effect_noise(pixels, 80).convert("RGB").save(image)
            parts.append({"type": "image", "image": image.name})
        parts.append({"type": "text", "text": f"how many? {number}"})
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"{number * 37}"}]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the images."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def run(flags, weights, folder) -> list[str]:
    """Flags of two steps from weights that all runs load."""
    (folder / "rows.jsonl").write_text("\n".join(rows(folder)))
    data = ("--train-data-path", str(folder / "rows.jsonl"), "--media-root", str(folder))
    return [*flags, "--load-hf", weights, "--train-iters", "2", *data]


@pytest.fixture(scope="module")
def alone(run) -> Steps:
    """The single rank's."""
    return train(run)


def cut_steps(rank: int, *, flags: list[str], encoders: int = 1) -> Steps:
    """Of a run in which some unit of each encoder is shared."""
    shared: set[str] = set()
    begin = Executor.begin

    def beginning(self: Executor, chunk: Any, microbatches: Any, *, training: bool) -> None:
        shared.update(
            name for each in microbatches for name, unit in each.units.items() if unit.shares[1:]
        )
        begin(self, chunk, microbatches, training=training)

    Executor.begin = beginning  # type: ignore[method-assign]
    found = steps(rank, flags=flags)
    assert len(shared) == encoders, shared
    return found


@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_those_of_one_rank(run, alone, name):
    ranks, layout = CASES[name]
    assert same(train(run, *layout, ranks=ranks, function=cut_steps), alone)


def test_two_encoders_units_are_shared_apart(flags, tmp_path):
    """One microbatch with scans and sounds: each encoder's media over two replicas."""
    make_sound_data(tmp_path, train=16, test=1)
    hears = (
        *("--model-name", "qwen2_5_omni_tiny", "--seq-length", "320", "--train-iters", "1"),
        *("--tokenizer-model", str(tmp_path / "processor_qwen2_5_omni")),
        *("--train-data-path", str(tmp_path / "train_both.jsonl")),
    )
    weights = str(tmp_path / "hf")
    train(flags, *hears, "--lr", "0", "--save-hf", weights)
    both = [*flags, *hears, "--load-hf", weights]
    found = train(both, *FULL, *ALL_IN_ONE, ranks=2, function=cut_steps, encoders=2)
    assert same(found, train(both))


def test_a_sample_with_a_bad_image_in_one_share_teaches_nothing_of_the_others(
    run, alone, folder, tmp_path
):
    """All ranks hear of it from the one that reads that image."""
    lines = rows(folder)
    lines[2] = cut(lines[2], source=folder, folder=tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = [*run, "--train-data-path", str(tmp_path / "rows.jsonl"), "--bad-sample", "skip"]
    expected = train(data)
    assert not same(expected, alone)
    assert same(train(data, *FULL, *ALL_IN_ONE, ranks=2, function=cut_steps), expected)
