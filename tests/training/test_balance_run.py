"""Whole runs in which units go to the replicas by what they cost."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from image_units import unit_of
from layout_flags import BALANCED, PP2
from ranks import run_ranks

from loongplug.data import source
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Share
from loongplug.data.planned_media import MediaBatch, PlannedUnit
from loongplug.hetero.balance import Balance
from loongplug.training.config import compose_model
from loongplug.training.delivery import ReplicaDelivery
from loongplug.training.run import run

pytestmark = pytest.mark.slow

SEPARATED = (
    "--enable-full-hetero-dp",
    "--full-hetero-dp-schedule",
    "separated",
    "--micro-batch-size",
    "1",
    "--load-hf",
)
STEP = 8  # units


@pytest.fixture(scope="module")
def separated(flags, weights):
    """Flags of runs that start from the same weights, in any layout."""
    return [*flags, *SEPARATED, weights]


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


def test_owners_are_planned_and_the_losses_stay(separated):
    """With background processes, too, which load what is planned."""
    in_turn = observe(separated, *PP2, ranks=2)
    assert in_turn[0]["shares"][0][:STEP] == [whole(unit % 2) for unit in range(STEP)]
    found = observe(separated, *PP2, *BALANCED, "--num-workers", "1", ranks=2)
    require_plan(found)
    torch.testing.assert_close(found[0]["losses"], in_turn[0]["losses"], rtol=2e-5, atol=0)
    # All images once.
    assert sum(each["decoded"][0] for each in found) == sum(each["decoded"][0] for each in in_turn)
