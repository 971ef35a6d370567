"""Whole runs in which units go to the replicas by what they cost."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compared_runs import first_weights
from cut_images import cut
from image_units import unit_of
from ranks import run_ranks

from loongplug.data import source
from loongplug.data.assignment import PlannedUnit
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Share
from loongplug.data.units import MediaBatch
from loongplug.hetero.balance import Balance
from loongplug.training.config import compose_model
from loongplug.training.delivery import ReplicaDelivery
from loongplug.training.run import run

pytestmark = pytest.mark.slow

PP2 = ("--pipeline-model-parallel-size", "2")
TP2_PP2 = ("--tensor-model-parallel-size", "2", *PP2)
SEPARATED = (
    "--enable-full-hetero-dp",
    "--full-hetero-dp-schedule",
    "separated",
    "--micro-batch-size",
    "1",
    "--load-hf",
)
BALANCED = ("--use-vit-dp-balance", "--dp-balance-trigger-threshold-vit", "0")
STEP = 8  # units


@pytest.fixture(scope="module")
def separated(flags, tmp_path_factory):
    """Flags of runs that start from the same weights, in any layout."""
    return [*flags, *SEPARATED, first_weights(flags, tmp_path_factory.mktemp("weights") / "hf")]


def observed(rank: int, *, flags: list[str]) -> dict[str, Any]:
    """A run's losses, and by loader what it decoded, its units and who encodes them, in order."""
    loaders: list[MicrobatchLoader] = []
    units: list[list[MediaBatch]] = []
    shares: list[list[tuple[Share, ...]]] = []
    original, deliver = MicrobatchLoader.__next__, ReplicaDelivery.__call__
    seen: list[MediaBatch] = []

    def next_microbatch(self: MicrobatchLoader) -> Any:
        if self not in loaders:
            loaders.append(self)
            units.append([])
            shares.append([])
        microbatch = original(self)
        units[loaders.index(self)].append(seen.pop())
        shares[loaders.index(self)].append(unit_of(microbatch).shares)
        return microbatch

    def delivered(self: Any, planned: PlannedUnit) -> Any:
        seen.append(planned.media)
        return deliver(self, planned)

    # Without a cache every image is counted each time it is read.
    source._MEDIA_CACHE_BYTES = 0
    MicrobatchLoader.__next__ = next_microbatch
    ReplicaDelivery.__call__ = delivered
    losses = [step.loss for step in run(flags)]
    return {
        "losses": losses,
        "decoded": [each.source.decoded for each in loaders],
        "units": units,
        "shares": shares,
    }


def observe(flags: list[str], *more: str, ranks: int) -> list[dict[str, Any]]:
    return run_ranks(observed, ranks, flags=[*flags, *more], timeout=150.0)


def steps(units: Sequence[Any]) -> list[Sequence[Any]]:
    return [units[start : start + STEP] for start in range(0, len(units), STEP)]


def whole(encoder_replica: int) -> tuple[Share, ...]:
    """A unit that is not cut."""
    return (Share(encoder_replica=encoder_replica),)


def require_plan(found: list[dict[str, Any]]) -> None:
    """Every rank knows the plan of each step, and decodes what it gives to the rank."""
    encoder = compose_model(model_name="qwen3_vl_tiny").config.image_encoder
    balance = Balance.of(encoder, threshold=0.0)
    for number, units in enumerate(found[0]["units"]):
        planned = [
            shares
            for step in steps(units)
            for shares in balance.assign([unit.grids for unit in step], replicas=len(found))
        ]
        assert planned != [whole(unit.index % STEP % len(found)) for unit in units]
        assert all(each["shares"][number] == planned for each in found)
        images: Counter[int] = Counter()
        for unit, shares in zip(units, planned, strict=True):
            for share in shares:
                media = unit.part(share.media).media
                images[share.encoder_replica] += len({str(medium) for medium in media})
        assert [each["decoded"][number] for each in found] == [
            images[rank] for rank in range(len(found))
        ]


@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    [
        (PP2, 2, ("--num-workers", "1")),
        (TP2_PP2, 4, ()),
    ],
    ids=["pp2-workers", "tp2-pp2"],
)
def test_owners_are_planned_and_the_losses_stay(separated, layout, ranks, more):
    in_turn = observe(separated, *layout, ranks=ranks)
    assert in_turn[0]["shares"][0][:STEP] == [whole(unit % ranks) for unit in range(STEP)]
    found = observe(separated, *layout, *BALANCED, *more, ranks=ranks)
    require_plan(found)
    torch.testing.assert_close(found[0]["losses"], in_turn[0]["losses"], rtol=2e-5, atol=0)
    # All images once.
    assert sum(each["decoded"][0] for each in found) == sum(each["decoded"][0] for each in in_turn)


def test_evaluation_is_balanced_and_a_resumed_run_plans_the_same_steps(separated, demo, tmp_path):
    evaluates = (
        *("--valid-data-path", str(demo / "test.jsonl")),
        *("--eval-iters", "1", "--eval-interval", "2"),
    )
    saves = ("--save", str(tmp_path), "--save-interval", "2")
    whole = observe(separated, *PP2, *BALANCED, *evaluates, *saves, ranks=2)
    require_plan(whole)
    assert len(whole[0]["units"]) == 2
    resumes = ("--load", str(tmp_path), "--ckpt-step", "2")
    resumed = observe(separated, *PP2, *BALANCED, *resumes, ranks=2)
    assert resumed[0]["shares"][0] == whole[0]["shares"][0][2 * STEP :]
    require_plan(resumed)
    assert resumed[0]["losses"] == pytest.approx(whole[0]["losses"][2:], rel=2e-5)


def test_packs_with_samples_whose_pixels_are_bad(separated, demo, tmp_path):
    """Known to the rank that decodes the unit, which is another one with balance."""
    rows = (demo / "train.jsonl").read_text().splitlines()
    with_image = [number for number, row in enumerate(rows) if '"image"' in row]
    for number in with_image[::6]:
        rows[number] = cut(rows[number], source=demo, folder=tmp_path)
    data, metrics = tmp_path / "rows.jsonl", tmp_path / "metrics.json"
    data.write_text("\n".join(rows))
    more = (
        *("--train-data-path", str(data), "--media-root", str(demo), "--bad-sample", "skip"),
        *("--packing", "--packing-look-ahead", "4", "--seq-length", "160", "--train-iters", "2"),
        *("--metrics-json", str(metrics)),
    )
    in_turn = observe(separated, *PP2, *more, ranks=2)
    bad = json.loads(metrics.read_text())["bad_samples"]
    # Each as often as it is in a microbatch, whichever rank decodes it.
    media = [
        (medium.row, medium.number) for unit in in_turn[0]["units"][0] for medium in unit.media
    ]
    assert bad == {"pixels": sum(map([(row, 0) for row in with_image[::6]].count, media))}
    assert bad["pixels"] > 2
    found = observe(separated, *PP2, *BALANCED, *more, ranks=2)
    assert set(found[0]["shares"][0]) >= {whole(0), whole(1)}
    assert all(each["shares"] == found[0]["shares"] for each in found)
    assert found[0]["shares"] != in_turn[0]["shares"]
    assert json.loads(metrics.read_text())["bad_samples"] == bad
    torch.testing.assert_close(found[0]["losses"], in_turn[0]["losses"], rtol=2e-5, atol=0)
