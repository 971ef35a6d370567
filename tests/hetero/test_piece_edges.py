"""Pieces over edges within a model replica: one order at both ends, and every row in its place."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER
from ranks import run_ranks
from streamed_steps import steps

from loongplug.hetero.exchange import ExchangeSpec, taken
from loongplug.hetero.piece_edges import PieceEdges, PieceGroups
from loongplug.hetero.pipeline_clock import EncoderPlan, Step
from loongplug.hetero.placement import Edge, all_ranks_dp
from loongplug.hetero.routes import Rows
from loongplug.hetero.streaming import separated, streamed
from loongplug.parallel.layout import Layout
from loongplug.parallel.states import create_exchange_group

WIDTH = 3


@dataclass
class Wires:
    """What ranks send and post, in the place of process groups."""

    rank: int = 0
    # By direction and both ranks: the rows of each message, at either end.
    sent: defaultdict[tuple[Any, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    posted: defaultdict[tuple[Any, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def get_rank(self) -> int:
        return self.rank

    def isend(self, rows: torch.Tensor, *, dst: int, group: Any) -> "Wires":
        self.sent[group, self.rank, dst].append(len(rows))
        return self

    def irecv(self, rows: torch.Tensor, *, src: int, group: Any) -> "Wires":
        self.posted[group, src, self.rank].append(len(rows))
        return self

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


def drive(edges: PieceEdges, replica: int, *, step: Step, plan: EncoderPlan) -> None:
    """All that a rank does with pieces in a step, in the order of the plan and of its passes."""
    stage = step.replicas[replica]
    numbers = {name: number for number, name in enumerate(step.names)}
    work = list(plan.work[replica])
    for place, one in enumerate([*step.passes[stage], None]):
        while work and (one is None or work[0].before <= place):
            number = numbers[work[0].microbatch, work[0].piece]
            if work.pop(0).forward:
                edges.send_features(number, torch.zeros(number + 1, 1))
            else:
                edges.receive_gradient(number)
        if one is None or one.place:
            continue
        for piece in range(len(step.pieces[one.microbatch])):
            number = numbers[one.microbatch, piece]
            if one.forward:
                edges.receive_features(number)
            elif step.trains:
                edges.send_gradient(number, torch.zeros(number + 1, 1))
    edges.drain()


@given(steps(), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_every_pair_has_one_order_in_each_direction(step: Step, window: int, fills: bool) -> None:
    """A message's rows are the number of its piece: queues of one stream cannot cross."""
    plan = streamed(step) if fills else separated(step)
    owners = {
        (one.microbatch, one.piece): replica
        for replica, work in enumerate(plan.work)
        for one in work
        if one.forward
    }
    pieces = ExchangeSpec(
        tokens=tuple(range(1, len(step.names) + 1)),
        encoder_replicas=tuple(owners[name] for name in step.names),
        width=1,
        dtype=torch.float32,
    )
    ranks = range(len(step.replicas))
    edge = Edge(replicas=tuple((rank,) for rank in ranks), consumers=step.lanes[0])
    groups: Any = PieceGroups(features="features", gradients="gradients")  # type: ignore[arg-type]
    wires = Wires()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_rank", "isend", "irecv"):
            patch.setattr(dist, name, getattr(wires, name))
        for wires.rank in ranks:
            edges = PieceEdges(edge, groups, window=window, device=torch.device("cpu"))
            edges.begin(pieces, trains=step.trains)
            drive(edges, wires.rank, step=step, plan=plan)
    assert wires.sent == wires.posted
    for orders in (wires.sent, wires.posted):
        assert all(order == sorted(order) for order in orders.values())
    # Of the features, all that a consumer has not made itself.
    count = sum(len(order) for (name, *_), order in wires.sent.items() if name == "features")
    others = sum(owner != consumer for owner in owners.values() for consumer in edge.consumers)
    assert count == others


@pytest.mark.quick
def test_a_piece_out_of_turn_is_refused() -> None:
    edge = Edge(replicas=((0,), (1,)), consumers=(0,))
    groups: Any = PieceGroups(features="features", gradients="gradients")  # type: ignore[arg-type]
    pieces = ExchangeSpec(tokens=(1, 1), encoder_replicas=(1, 1), width=1, dtype=torch.float32)
    wires = Wires()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_rank", "isend", "irecv"):
            patch.setattr(dist, name, getattr(wires, name))
        edges = PieceEdges(edge, groups, window=1, device=torch.device("cpu"))
        edges.begin(pieces, trains=False)
        with pytest.raises(AssertionError, match="is not the next of features"):
            edges.receive_features(1)
        edges.receive_features(0)
        with pytest.raises(AssertionError, match="nobody took features"):
            edges.drain()


# Of five pieces: their tokens, who encodes them, and what each of two sequence shards needs.
TOKENS, OWNERS = (4, 0, 3, 5, 1), (1, 0, 3, 2, 0)
SHARDS: tuple[tuple[Rows, ...], ...] = (
    ((slice(0, 1), slice(2, 3)), (slice(1, 2), slice(3, 4))),
    ((), ()),
    ((slice(0, 3),), ()),
    ((slice(0, 2),), (slice(2, 5),)),
    ((), (slice(0, 1),)),
)


def made(piece: int) -> torch.Tensor:
    """Features that say where they belong, [tokens, WIDTH]."""
    rows = torch.arange(TOKENS[piece]) + 10.0 * (piece + 1)
    return rows.unsqueeze(1) + torch.arange(1, WIDTH + 1) / 10


def there_and_back(rank: int, *, split: bool, trains: bool) -> int:
    """Two steps at tp 2 and pp 2; the rows whose values were looked at."""
    placement = all_ranks_dp(Layout(tp=2, pp=2), entry=ENCODER, tp=1)
    edge = placement.edge(ENCODER.name, rank=rank)
    features, gradients = (
        create_exchange_group(name, placement.exchange_groups(ENCODER.name), options_of="mp")
        for name in ("features", "gradients")
    )
    assert features is not None
    assert gradients is not None
    groups = PieceGroups(features=features, gradients=gradients)
    edges = PieceEdges(edge, groups, window=2, device=torch.device("cpu"))
    pieces = ExchangeSpec(
        tokens=TOKENS,
        encoder_replicas=OWNERS,
        width=WIDTH,
        dtype=torch.float32,
        shards=SHARDS if split else None,
    )
    mine = [piece for piece, owner in enumerate(OWNERS) if rank in edge.replicas[owner]]
    seen = 0
    for step in range(2):
        edges.begin(pieces, trains=trains)
        for piece in mine:
            edges.send_features(piece, made(piece) + step)
        if rank in edge.consumers:
            shard = edge.consumers.index(rank)
            for piece in range(len(TOKENS)):
                rows = SHARDS[piece][shard] if split else (slice(0, TOKENS[piece]),)
                found = edges.receive_features(piece)
                assert torch.equal(found, taken(made(piece) + step, rows))
                seen += len(found)
                if trains:
                    edges.send_gradient(piece, -2 * found)
        for piece in mine if trains else ():
            found = edges.receive_gradient(piece)
            assert torch.equal(found, -2 * (made(piece) + step))
            seen += len(found)
        edges.drain()
    return seen


@pytest.mark.parametrize(("split", "trains"), [(False, True), (True, True), (True, False)])
def test_features_and_gradients_arrive_once(split: bool, trains: bool) -> None:
    seen = run_ranks(there_and_back, 4, split=split, trains=trains)
    rows = sum(TOKENS)
    assert sum(seen) == 2 * (rows * (1 if split else 2) + rows * trains)
