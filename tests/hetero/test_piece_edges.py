"""Pieces over edges within a model replica: one order at both ends, and every row in its place."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import ENCODER
from ranks import run_ranks
from streamed_steps import even, steps

from loongplug.data.microbatch import Share
from loongplug.hetero.exchange import ExchangeSpec, taken
from loongplug.hetero.piece_edges import PieceEdges, PieceGroups, create_piece_groups
from loongplug.hetero.placement import Edge, all_ranks_dp
from loongplug.hetero.routes import Rows
from loongplug.hetero.step_costs import DecoderPass, EncoderPlan, Step
from loongplug.hetero.streaming import separated, streamed
from loongplug.parallel.layout import Layout
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, Post, Wait
from loongplug.simulate.wires import on_streams

WIDTH = 3


Message = tuple[Any, int, int, int]  # group, source, target, and which one of theirs


@dataclass
class Wires:
    """What ranks send, post and wait for, in the place of process groups."""

    rank: int = 0
    # By group and both ranks: the rows of each message, at either end.
    sent: defaultdict[tuple[Any, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    posted: defaultdict[tuple[Any, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    did: defaultdict[int, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def get_rank(self) -> int:
        return self.rank

    def isend(self, rows: torch.Tensor, *, dst: int, group: Any) -> "Sent":
        way = group, self.rank, dst
        self.sent[way].append(len(rows))
        self.does("moves", (*way, len(self.sent[way])))
        return Sent()

    def irecv(self, rows: torch.Tensor, *, src: int, group: Any) -> "Posted":
        way = group, src, self.rank
        self.posted[way].append(len(rows))
        message = *way, len(self.posted[way])
        self.does("moves", message)
        return Posted(self, message)

    def does(self, what: str, which: Any) -> None:
        self.did[self.rank].append((what, which))


@dataclass
class Posted:
    wires: Wires
    message: Message

    def wait(self) -> None:
        self.wires.does("waits", self.message)


class Sent:
    """Which nobody waits for while the step goes on."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


def ends(did: dict[int, list[tuple[str, Any]]], *, one_queue: bool = False) -> bool:
    """Whether a step ends where what two ranks move in a group goes through one queue on each.

    As with NCCL; ``one_queue`` is that of :func:`on_streams`.
    """
    build = Build()

    def acts(rank: int) -> Iterator[Act]:
        for what, which in did[rank]:
            if what == "says":
                yield Post(((build.message("says", which), True),))
                continue
            if which[0] == "pass":
                yield Wait(((build.message("says", which), False),))
                continue
            group, source, target, number = which
            stream = (group, source, target)
            end = build.message(stream, number, eager=False), rank == source
            yield Post((end,)) if what == "moves" else Wait((end,))

    def communicator(stream: Any) -> Any:
        return None if stream == "says" else (stream[0], *sorted(stream[1:]))

    programs = build.programs([[*acts(rank)] for rank in sorted(did)])
    try:
        order(on_streams(programs, communicator=communicator, one_queue=one_queue))
    except Deadlock:
        return False
    return True


def drive(edges: PieceEdges, replica: int, *, step: Step, plan: EncoderPlan, wires: Wires) -> None:
    """All that a rank does in a step, as the plan, the passes and the communicator have it."""
    stage = step.replicas[replica]
    numbers = {name: number for number, name in enumerate(step.names)}
    work = list(plan.work[replica])
    for place, one in enumerate([*step.passes[stage], None]):
        posted = None if one is None else pipeline_input(step, replica, one, wires=wires)
        while work and (one is None or work[0].before <= place):
            forward, names = work.pop(0)[1:]
            for number in map(numbers.__getitem__, names):
                if forward:
                    edges.send_features(number, torch.zeros(number + 1, 1))
                else:
                    edges.receive_gradient(number)
        if one is None:
            break
        if posted is not None:
            posted.wait()
        count = len(step.pieces[one.microbatch]) if one.place == 0 else 0
        pieces = [(one.microbatch, piece) for piece in range(count)]
        if one.forward:
            for name in pieces:
                edges.receive_features(numbers[name])
        wires.does("says", ("pass", one, replica))
        for other in step.lanes[stage]:  # of one tensor parallel group
            wires.does("waits", ("pass", one, other))
        if not one.forward:
            for number in map(numbers.__getitem__, pieces if step.encoder.trains else ()):
                edges.send_gradient(number, torch.zeros(number + 1, 1))
        pipeline_output(step, replica, one, wires=wires)
    edges.drain()


def peer(step: Step, replica: int, one: DecoderPass) -> int:
    """Of this replica, on the stage of another pass."""
    lane = step.lanes[step.replicas[replica]].index(replica)
    return step.lanes[one.place % len(step.passes)][lane]


def group_of(step: Step, one: DecoderPass) -> str:
    """Of what a pass makes: around is from the last stage to the first, or back."""
    stage = one.place % len(step.passes)
    around = stage == (len(step.passes) - 1 if one.forward else 0)
    return f"{'activations' if one.forward else 'gradients'} {around}"


def pipeline_input(step: Step, replica: int, one: DecoderPass, *, wires: Wires) -> Posted | None:
    before = step.before(one)
    if before is None or (source := peer(step, replica, before)) == replica:
        return None
    return wires.irecv(torch.zeros(1), src=source, group=group_of(step, before))


def pipeline_output(step: Step, replica: int, one: DecoderPass, *, wires: Wires) -> None:
    behind = step.behind(one)
    if behind is not None and (target := peer(step, replica, behind)) != replica:
        wires.isend(torch.zeros(1), dst=target, group=group_of(step, one))


def drawn(step: Step, plan: EncoderPlan, *, window: int, groups: PieceGroups) -> Wires:
    """All ranks' step, by real edges and the names of their groups."""
    owners = owners_of(plan)
    spec = ExchangeSpec(
        tokens=tuple(range(1, len(step.names) + 1)),
        shares=tuple((Share(encoder_replica=owners[name]),) for name in step.names),
        width=1,
        dtype=torch.float32,
    )
    ranks = range(len(step.replicas))
    edge = Edge(replicas=tuple((rank,) for rank in ranks), consumers=step.lanes[0])
    wires = Wires()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_rank", "isend", "irecv"):
            patch.setattr(dist, name, getattr(wires, name))
        for wires.rank in ranks:
            edges = PieceEdges(edge, groups, window=window, device=torch.device("cpu"))
            edges.begin(spec, trains=step.encoder.trains)
            drive(edges, wires.rank, step=step, plan=plan, wires=wires)
    return wires


def owners_of(plan: EncoderPlan) -> dict[tuple[int, int], int]:
    """Which replica encodes a piece."""
    return {
        name: replica
        for replica, work in enumerate(plan.work)
        for one in work
        for name in one.pieces
    }


FEATURES: Any = ("features up", "features down")
GRADIENTS: Any = ("gradients up", "gradients down")
GROUPS = PieceGroups(features=FEATURES, gradients=GRADIENTS)


@given(steps(), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_every_pair_has_one_order_in_each_direction(step: Step, window: int, fills: bool) -> None:
    """A message's rows are the number of its piece: queues of one stream cannot cross."""
    plan = streamed(step) if fills else separated(step)
    wires = drawn(step, plan, window=window, groups=GROUPS)
    assert wires.sent == wires.posted
    for (name, *_), rows in (*wires.sent.items(), *wires.posted.items()):
        assert rows == sorted(rows) or name not in {*FEATURES, *GRADIENTS}
    one_way = {(name, *sorted(pair)) for name, *pair in wires.sent}
    assert len(one_way) == len(wires.sent)
    # Of the features, all that a consumer has not made itself.
    count = sum(len(rows) for way, rows in wires.sent.items() if way[0] in FEATURES)
    owners = owners_of(plan).values()
    assert count == sum(owner != consumer for owner in owners for consumer in step.lanes[0])
    assert ends(wires.did)


def test_one_queue_for_both_ways_of_two_ranks_hangs() -> None:
    """Two ranks of the first stage that each wait for the other's features first."""
    step = even(2, percent=50, lanes=2)
    both: Any = PieceGroups(features=("there",) * 2, gradients=("back",) * 2)  # type: ignore[arg-type]
    for plan in (streamed(step), separated(step)):
        assert ends(drawn(step, plan, window=1, groups=GROUPS).did)
        assert not ends(drawn(step, plan, window=1, groups=both).did)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_device_with_one_queue_hangs(window: int) -> None:
    """Whatever is done about receives: a second gradient sets out before the first is taken."""
    for stages, percent in ((2, 30), (8, 20)):
        step = even(stages, percent=percent)
        for plan in (streamed(step), separated(step)):
            did = drawn(step, plan, window=window, groups=GROUPS).did
            assert ends(did)
            assert not ends(did, one_queue=True)


@pytest.mark.quick
def test_a_piece_out_of_turn_is_refused() -> None:
    edge = Edge(replicas=((0,), (1,)), consumers=(0,))
    pieces = ExchangeSpec(
        tokens=(1, 1), shares=((Share(encoder_replica=1),),) * 2, width=1, dtype=torch.float32
    )
    wires = Wires()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_rank", "isend", "irecv"):
            patch.setattr(dist, name, getattr(wires, name))
        edges = PieceEdges(edge, GROUPS, window=1, device=torch.device("cpu"))
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
    groups = create_piece_groups(
        ENCODER.name, placement.edges(ENCODER.name), device=torch.device("cpu")
    )
    assert groups is not None
    edges = PieceEdges(edge, groups, window=2, device=torch.device("cpu"))
    pieces = ExchangeSpec(
        tokens=TOKENS,
        shares=tuple((Share(encoder_replica=each),) for each in OWNERS),
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
