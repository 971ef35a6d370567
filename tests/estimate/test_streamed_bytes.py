"""What the estimate enters of a step that streams: all that comes goes, less is there at once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import batched, pairwise
from math import inf, prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loongplug.data.positions import Grid
from loongplug.data.source import Assignment
from loongplug.estimate.encoded_units import EncodedUnits, UnitCosts
from loongplug.estimate.encoder_bytes import EncoderBytes
from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, Ledger
from loongplug.estimate.trace import UnitBytes
from loongplug.estimate.units import UnitSize
from loongplug.estimate.wire_bytes import WireBytes
from loongplug.hetero.crossings import streamed_crossings
from loongplug.hetero.operations import BEGIN, END, Kept, before_pass, forward, gradient
from loongplug.hetero.placement import Edge
from loongplug.hetero.policies import EncoderStep, streamed
from loongplug.hetero.step_costs import FREE, PassCosts, PieceCost
from loongplug.hetero.streamed_pieces import StepPlanner, StreamedCosts, StreamedStep

pytestmark = pytest.mark.quick

PAYLOAD, TOKENS = 10, 4
GRID: Grid = (1, 4, 4)
ROWS = prod(GRID)


def planned(stages: int, microbatches: int, *, each: PieceCost = FREE) -> StreamedStep:
    """Four media to a microbatch; encoders have a third of the work, without what passes take."""
    found = planner(stages, each=each, joined=4 * microbatches).plan([[GRID] * 4] * microbatches)
    assert found is not None
    return found


def planner(stages: int, *, each: PieceCost = FREE, joined: int) -> StepPlanner:
    """Media cost as much as their rows."""

    def of_media(grids: Sequence[Grid]) -> PieceCost:
        rows = sum(map(prod, grids))
        return PieceCost(100 * rows // ROWS, 200 * rows // ROWS)

    costs = StreamedCosts(
        of_media=of_media,
        tokens=lambda grid: prod(grid) // (ROWS // TOKENS),
        forward=(800 // stages,) * stages,
        backward=(1600 // stages,) * stages,
        group=stages,
        of_passes=PassCosts(each=each, joined=100 * joined),
        assigned=lambda units, replicas: Assignment(replicas=replicas).of_step(units),
        joined_rows=None,
    )
    return StepPlanner(costs, stages=range(stages))


def followed(
    found: StreamedStep, stage: int, *, shards: int = 1, on_host: frozenset[Kept] = frozenset()
) -> Ledger:
    """A step of the first of a stage's ranks, which are as many as a sequence has ``shards``."""
    stages, costs = len(found.passes), UnitBytes(kept=0, forward=0, backward=0)
    rank, ranks = stage * shards, range(stages * shards)
    edge = Edge(replicas=tuple(batched(ranks, shards)), consumers=tuple(ranks[:shards]))
    encoded = EncodedUnits(
        units=[whole_unit(found, number, shards=shards) for number in range(found.microbatches)],
        costs=UnitCosts(blank=costs, blank_rows=0, largest=UnitBytes(kept=7), largest_rows=16),
        width=PAYLOAD,
        dtype=torch.uint8,
        row=1,
        blank_input=0,
    )
    crossings = streamed_crossings(found.pieces, encoded.spec(), edge=edge, cp=1, rank=rank)
    step = EncoderStep(
        encoder_replicas=((0,),) * found.microbatches,
        replicas=stages,
        replica=stage,
        consumes=stage == 0,
        training=True,
        trains=True,
        last_stage=stage == stages - 1,
        on_host=on_host,
        stream=found.stream(stage),
    )
    side = EncoderBytes(
        plan=streamed(step),
        encoded=replace(
            encoded,
            units=[UnitSize(grids=(GRID,), row_tokens=(each.tokens,)) for each in found.pieces],
        ),
        wires=(WireBytes(crossings.ends, rank=rank, most=inf, trains=True),),
        crossings=crossings,
        streamed=found.stream(stage).pieces,
    )
    ledger = Ledger()
    side.at(ledger, BEGIN)
    for number, one in enumerate(found.passes[stage]):
        side.at(ledger, before_pass(number))
        if one.place == 0 and stage == 0:
            side.at(ledger, (forward if one.forward else gradient)(one.microbatch))
    side.at(ledger, before_pass(len(found.passes[stage])))
    side.at(ledger, END)
    return ledger


def whole_unit(found: StreamedStep, microbatch: int, *, shards: int) -> UnitSize:
    """Its tokens, spread evenly over the ``shards`` of the sequence."""
    tokens = sum(each.tokens for each in found.pieces if each.microbatch == microbatch)
    ends = pairwise(tokens * number // shards for number in range(shards + 1))
    return UnitSize(
        row_tokens=(tokens,),
        shards=tuple((slice(*each),) for each in ends) if shards > 1 else None,
    )


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 16), (4, 16)])
def test_all_that_comes_goes(stages: int, microbatches: int, shards: int) -> None:
    found = planned(stages, microbatches)
    whole = PAYLOAD * TOKENS * 4 * microbatches  # what is there at once where it is separated
    for stage in range(stages):
        ledger = followed(found, stage, shards=shards)
        assert not +ledger.live, (stage, ledger.live)
        for kind in (FEATURES, FEATURE_GRADIENTS):
            assert 0 < ledger.most[kind] < whole
        own = sum(each.replica == stage for each in found.pieces)
        assert 0 < ledger.most[ENCODER] <= 7 * own
    first = followed(found, 0)
    if microbatches == 16:
        assert first.most[FEATURES] <= whole // 3


@given(
    stages=st.integers(2, 8),
    units=st.lists(
        st.lists(st.sampled_from([GRID, (1, 2, 2), (1, 32, 32), (8, 8, 8)]), max_size=6),
        min_size=1,
        max_size=12,
    ).filter(any),
    each=st.sampled_from([FREE, PieceCost(100, 200)]),
)
@settings(deadline=None)
def test_never_more_than_where_it_is_separated(
    stages: int, units: list[list[Grid]], each: PieceCost
) -> None:
    """On the first stage, of media that are as uneven as can be, with receives posted ahead."""
    found = planner(stages, each=each, joined=64).plan(units)
    assume(found is not None)
    assert found is not None
    whole = PAYLOAD * sum(piece.tokens for piece in found.pieces)
    ledger = followed(found, 0)
    assert not +ledger.live, ledger.live
    for kind in (FEATURES, FEATURE_GRADIENTS):
        assert 0 < ledger.most[kind] <= whole


def test_activations_that_leave_are_not_there() -> None:
    found = planned(4, 16)
    for stage in range(4):
        stays = followed(found, stage)
        leaves = followed(found, stage, on_host=frozenset({Kept.ACTIVATIONS}))
        assert not +leaves.live, (stage, leaves.live)
        assert 0 < leaves.most[ENCODER] < stays.most[ENCODER]


def test_pieces_of_one_pass_come_and_go_together() -> None:
    found = planned(2, 16, each=PieceCost(100, 200))
    whole = PAYLOAD * TOKENS * 4 * 16
    for stage in range(2):
        passes = [each.pieces for each in found.work[stage] if each.forward]
        assert len(passes) < sum(map(len, passes)), "several to a pass"
        ledger = followed(found, stage)
        assert not +ledger.live, (stage, ledger.live)
        assert 0 < ledger.most[FEATURES] <= whole
        largest = max(map(len, passes))
        assert 7 * largest <= ledger.most[ENCODER] <= 7 * sum(map(len, passes))
