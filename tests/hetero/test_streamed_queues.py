"""Pieces over edges within a model replica: one order at both ends, and every row in its place."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delivered import delivered, places_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loongplug.hetero.piece_edges import piece_ends, piece_wire
from placed import ENCODER, placements
from simulated import finish
from streamed_steps import even, steps

from loongplug.data.microbatch import Share
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import Edge, all_ranks_dp
from loongplug.hetero.routes import Rows, used_pairs
from loongplug.hetero.step_costs import DecoderPass, EncoderPlan, Step
from loongplug.hetero.streaming import separated, streamed
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout
from loongplug.simulate.programs import Act, Build, Post, Wait
from loongplug.simulate.wires import on_streams

PieceMessage = tuple[Any, int, int, int]  # group, source, target, and which one of theirs


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
    message: PieceMessage

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
    return finish(on_streams(programs, communicator=communicator, one_queue=one_queue))


def drive(
    edges: Wire[ExchangeSpec], replica: int, *, step: Step, plan: EncoderPlan, wires: Wires
) -> None:
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
                    edges.send(Cargo.FEATURES, number, torch.zeros(number + 1, 1))
                else:
                    edges.receive(Cargo.GRADIENTS, number)
        if one is None:
            break
        if posted is not None:
            posted.wait()
        count = len(step.pieces[one.microbatch]) if one.place == 0 else 0
        pieces = [(one.microbatch, piece) for piece in range(count)]
        if one.forward:
            for name in pieces:
                edges.receive(Cargo.FEATURES, numbers[name])
        wires.does("says", ("pass", one, replica))
        for other in step.lanes[stage]:  # of one tensor parallel group
            wires.does("waits", ("pass", one, other))
        if not one.forward:
            for number in map(numbers.__getitem__, pieces if step.encoder.trains else ()):
                edges.send(Cargo.GRADIENTS, number, torch.zeros(number + 1, 1))
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


def drawn(step: Step, plan: EncoderPlan, *, window: int, groups: dict[Cargo, Any]) -> Wires:
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
            edges = piece_wire(edge, groups, device=torch.device("cpu"))
            edges.windows = dict.fromkeys(edges.windows, window)
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


KINDS = (Cargo.FEATURES, Cargo.GRADIENTS)


def over(what: Cargo) -> Any:
    """The group of a message; the name of one stands for it here."""
    return lambda source, target: f"{what.said} {'up' if source < target else 'down'}"


GROUPS = {what: over(what) for what in KINDS}
OF_PIECES = {over(what)(*ends) for what in KINDS for ends in ((0, 1), (1, 0))}


@given(steps(), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_every_pair_has_one_order_in_each_direction(step: Step, window: int, fills: bool) -> None:
    """A message's rows are the number of its piece: queues of one stream cannot cross."""
    plan = streamed(step) if fills else separated(step)
    wires = drawn(step, plan, window=window, groups=GROUPS)
    assert wires.sent == wires.posted
    for (name, *_), rows in (*wires.sent.items(), *wires.posted.items()):
        assert rows == sorted(rows) or name not in OF_PIECES
    one_way = {(name, *sorted(pair)) for name, *pair in wires.sent}
    assert len(one_way) == len(wires.sent)
    # Of the features, all that a consumer has not made itself.
    count = sum(len(rows) for way, rows in wires.sent.items() if way[0].startswith("features"))
    owners = owners_of(plan).values()
    assert count == sum(owner != consumer for owner in owners for consumer in step.lanes[0])
    assert ends(wires.did)


def test_one_queue_for_both_ways_of_two_ranks_hangs() -> None:
    """Two ranks of the first stage that each wait for the other's features first."""
    step = even(2, percent=50, lanes=2)
    both = {what: lambda *_, group=what.said: group for what in KINDS}
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
        edges = piece_wire(edge, GROUPS, device=torch.device("cpu"))
        edges.windows[Cargo.FEATURES] = 1
        edges.begin(pieces, trains=False)
        with pytest.raises(AssertionError, match="is not the next of features"):
            edges.receive(Cargo.FEATURES, 1)
        edges.receive(Cargo.FEATURES, 0)
        with pytest.raises(AssertionError, match="nobody took features"):
            edges.drain()


@st.composite
def pieces_of_a_step(draw: st.DrawFn) -> tuple[Edge, ExchangeSpec]:
    """An edge within a model replica, and pieces that go over it."""
    placement, _, rank = draw(placements())
    edge = placement.edge(ENCODER.name, rank=rank)
    consumers = len(edge.consumers)
    parts = draw(st.sampled_from([n for n in range(1, consumers + 1) if consumers % n == 0]))
    # Of each row of each piece, the part of the sequence that needs it.
    rows = draw(st.lists(st.lists(st.integers(0, parts - 1), max_size=6), max_size=8))
    shards = [[_slices(piece, part) for part in range(parts)] for piece in rows]
    owner = st.integers(0, len(edge.replicas) - 1)
    return edge, ExchangeSpec(
        tokens=tuple(map(len, rows)),
        shares=tuple((Share(encoder_replica=draw(owner)),) for _ in rows),
        width=1,
        dtype=torch.float32,
        shards=tuple(map(tuple, shards)) if parts > 1 else None,
    )


def _slices(piece: list[int], part: int) -> Rows:
    return tuple(slice(row, row + 1) for row, own in enumerate(piece) if own == part)


@pytest.mark.quick
@given(pieces_of_a_step())
@settings(max_examples=50, deadline=None)
def test_both_ends_list_the_same_messages(step: tuple[Edge, ExchangeSpec]) -> None:
    """Each piece to all consumers, its gradient to all who made it; over pairs that are used."""
    edge, spec = step
    pieces = range(len(spec.tokens))

    def whole(rank: int, piece: int) -> list[tuple[int, int]]:
        assert (rank, piece) in owners
        return [(piece, row) for row in range(spec.tokens[piece])]

    def needed(rank: int, piece: int) -> list[tuple[int, int]]:
        rows = spec.of_parts(piece)[edge.part_of(rank, parts=spec.parts)]
        return [(piece, row) for row in places_of(rows)]

    consumers = {(rank, piece) for rank in edge.consumers for piece in pieces}
    owners = {
        (rank, piece) for piece in pieces for rank in edge.replicas[spec.encoder_replicas[piece][0]]
    }
    for what, gives, takes, takers in (
        (Cargo.FEATURES, whole, needed, consumers),
        (Cargo.GRADIENTS, needed, whole, owners),
    ):
        ends = {rank: piece_ends(what, spec, edge=edge, rank=rank) for rank in edge.ranks}
        assert delivered(ends, gives) == {each: takes(*each) for each in takers if takes(*each)}
        pairs = {
            (rank, message.peer)
            for rank, own in ends.items()
            for end in own.given.values()
            for message in end.messages
        }
        used = used_pairs(edge, back=what.back, parts=spec.parts)
        assert pairs <= {*used, *((rank, rank) for rank in edge.ranks)}


@pytest.mark.quick
@pytest.mark.parametrize(("back", "parts", "own"), [(False, 8, 70), (True, 1, 7), (True, 8, 70)])
def test_only_pairs_that_a_transfer_can_use_are_connected(back: bool, parts: int, own: int) -> None:
    """Of a consumer at TP 8 and PP 8."""
    edge = all_ranks_dp(Layout(tp=8, pp=8), entry=ENCODER, tp=1).edge(ENCODER.name, rank=0)
    assert sum(3 in pair for pair in used_pairs(edge, back=back, parts=parts)) == own
