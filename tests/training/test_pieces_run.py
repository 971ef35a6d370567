"""Whole runs in which several replicas share a microbatch's images, against the single rank."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared_runs import Steps, first_weights, same, steps, train
from cut_images import cut
from digits.sounds import make_sound_data
from PIL import Image
from sweeps import sweep

from loongplug.data.microbatch import Share
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executor import Executor
from loongplug.hetero.routes import ExchangeSpec, size

pytestmark = pytest.mark.slow

PP2, TP2 = ("--pipeline-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
BALANCED = ("--use-vit-dp-balance", "--dp-balance-trigger-threshold-vit", "0")
DP, FULL = (
    ("--enable-encoder-hetero-dp", *TP2),
    ("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "separated", *PP2),
)
SP = "--sequence-parallel"
OFFLOADS = (
    *("--full-hetero-dp-cpu-offload", "--offload-encoder-activations", "--offload-encoder-state"),
)
VPP = ("--num-virtual-stages-per-pipeline-rank", "2")
ALL_IN_ONE = ("--micro-batch-size", "8")
THREE = ("--global-batch-size", "6")
ENCODER2 = "model.image_encoder.tensor_model_parallel_size=2"
# Of the eight rows of a step, in pixels: one row has most of the images, of three sizes.
IMAGES = {1: [(32, 32)], 2: [(96, 64), *[(64, 64)] * 4, (32, 64)], 5: [(64, 64)], 6: [(32, 32)]}
# Ranks and flags. Without balance, what is left at a step's end is cut.
CASES = {
    "full-balanced-vpp": (2, (*FULL, *VPP, *BALANCED, *OVERLAP)),
    "full-tp2-balanced-sp": (4, (*FULL, *TP2, SP, *BALANCED)),
    "full-tp2-balanced": (4, (*FULL, *TP2, *BALANCED, *OVERLAP)),
    "full-tp2-encoder2": (4, (*FULL, *TP2, ENCODER2, SP, *BALANCED)),
    "full-one-unit-offloads": (2, (*FULL, *ALL_IN_ONE, *OFFLOADS)),
    "dp-one-unit-sp": (2, (*DP, *ALL_IN_ONE, SP, *OVERLAP)),
    "dp-pp2-three-units": (4, (*DP, *PP2, *THREE, *OVERLAP)),
    "full-frozen": (2, (*FULL, *BALANCED, *OVERLAP)),
}
# What changes the numbers; the single rank has it too.
BOTH = {"dp-pp2-three-units": THREE, "full-frozen": ("+model.image_encoder.freeze=true",)}


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
def run(flags, folder) -> list[str]:
    """Flags of two steps from weights that all runs load."""
    weights = first_weights(flags, folder / "hf")
    (folder / "rows.jsonl").write_text("\n".join(rows(folder)))
    data = ("--train-data-path", str(folder / "rows.jsonl"), "--media-root", str(folder))
    return [*flags, "--load-hf", weights, "--train-iters", "2", *data]


@pytest.fixture(scope="module")
def alone(run) -> Callable[..., Steps]:
    """What the single rank makes of such batches, made once each."""
    return functools.cache(lambda *batch: train(run, *batch))


def cut_steps(
    rank: int, *, flags: list[str], fault: Callable[[], None] = lambda: None, encoders: int = 1
) -> Steps:
    """Of a run in which some unit of each encoder is shared."""
    shared: set[str] = set()
    begin = Executor.begin

    def beginning(self: Executor, chunk: Any, microbatches: Any, *, training: bool) -> None:
        shared.update(
            name for each in microbatches for name, unit in each.units.items() if unit.shares[1:]
        )
        begin(self, chunk, microbatches, training=training)

    Executor.begin = beginning  # type: ignore[method-assign]
    fault()
    found = steps(rank, flags=flags)
    assert len(shared) == encoders, shared
    return found


# The parity matrix has the others' layouts, too, with every gradient.
FEW = ("full-tp2-balanced-sp", "full-one-unit-offloads", "dp-one-unit-sp", "dp-pp2-three-units")


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_losses_and_norms_are_those_of_one_rank(run, alone, name):
    (ranks, layout), both = CASES[name], BOTH.get(name, ())
    found = train(run, *layout, *both, ranks=ranks, function=cut_steps)
    assert same(found, alone(*both))


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
    run, folder, tmp_path
):
    """All ranks hear of it from the one that reads that image."""
    lines = rows(folder)
    lines[2] = cut(lines[2], source=folder, folder=tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = [*run, "--train-data-path", str(tmp_path / "rows.jsonl"), "--bad-sample", "skip"]
    expected = train(data)
    assert not same(expected, train(run))
    assert same(train(data, *FULL, *ALL_IN_ONE, ranks=2, function=cut_steps), expected)


def of_others(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """As many rows to each share, but those of the other ones, from behind."""
    left = [
        row for share in shares for part in share.rows or () for row in range(part.start, part.stop)
    ][::-1]
    found = []
    for share in shares:
        count = size(share.rows or ())
        mine, left = sorted(left[:count]), left[count:]
        found.append(replace(share, rows=tuple(slice(row, row + 1) for row in mine)))
    return tuple(found)


def with_wrong_rows(direction: str) -> None:
    exchanged = getattr(AllToAll, direction)

    def wrong(self: AllToAll, parts: Any, units: ExchangeSpec) -> Any:
        shares = tuple(of_others(each) if len(each) > 1 else each for each in units.shares)
        return exchanged(self, parts, replace(units, shares=shares))

    setattr(AllToAll, direction, wrong)


@pytest.mark.parametrize(
    ("direction", "loss_differs"),
    [
        ("gather_variable_shape_embeddings", True),
        ("scatter_variable_shape_embeddings", False),
    ],
    ids=["features-in-another-s-place", "gradients-to-another-owner"],
)
def test_rows_of_another_share_show(run, alone, direction, loss_differs):
    """With the shapes of the right ones."""
    fault = functools.partial(with_wrong_rows, direction)
    one_step = ("--train-iters", "1")
    layout = (*FULL, *ALL_IN_ONE, *one_step)
    ((loss, norm),) = train(run, *layout, ranks=2, function=cut_steps, fault=fault)
    ((expected_loss, expected_norm),) = alone(*one_step)
    assert (abs(loss / expected_loss - 1) > 1e-5) == loss_differs
    assert abs(norm / expected_norm - 1) > 1e-4
