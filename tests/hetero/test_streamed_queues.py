"""Steps that stream on devices whose messages go in queues: one order for two ranks, and no hang.

What ranks send, post and deal is what the product's wires and dealers do; passes and the clock of
full separation stand for Megatron's schedule.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, product
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from queued import Queues, Sent, finish, on_streams
from streamed_steps import even, filled, separated, steps

from loongplug.data.microbatch import Share
from loongplug.hetero import wire
from loongplug.hetero.bubble_drafts import streamed
from loongplug.hetero.bubble_planner import Piece
from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.piece_routes import streamed_crossings
from loongplug.hetero.placement import Edge
from loongplug.hetero.row_moves import ExchangeSpec
from loongplug.hetero.step_programs import DecoderPass, EncoderPlan, Step
from loongplug.hetero.wire import Wire
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Programs

CPU = torch.device("cpu")
# The names of groups stand for them.
GROUPS: dict[Cargo, Any] = {what: what.said for what in (Cargo.FEATURES, Cargo.GRADIENTS)}
OF_PIECES = {*GROUPS.values()}


def communicator(stream: Any) -> Any:
    """Of two ranks in a group, whichever of them sends."""
    return stream[2], *sorted(stream[:2])


def ends(programs: Programs, **options: Any) -> bool:
    """Whether a step ends where what two ranks move in a group goes through one queue on each.

    As with NCCL; ``options`` are those of :func:`on_streams`.
    """
    return finish(on_streams(programs, communicator=communicator, **options))


def drive(
    carrier: Carrier,
    replica: int,
    *,
    step: Step,
    plan: EncoderPlan,
    queues: Queues,
    pieces: Sequence[Piece],
) -> None:
    """All that a rank does in a step, as the plan, the passes and the communicator have it."""
    stage, edges = step.replicas[replica], carrier.wire
    numbers = {name: number for number, name in enumerate(step.names)}
    work = list(plan[replica])
    needed: dict[int, torch.Tensor] = {}
    for place, one in enumerate([*step.passes[stage], None]):
        posted = None if one is None else pipeline_input(step, replica, one, queues=queues)
        while work and (one is None or work[0].before <= place):
            forward, names = work.pop(0)[1:]
            for number in map(numbers.__getitem__, names):
                if forward:
                    edges.send(
                        Cargo.FEATURES,
                        number,
                        torch.zeros(pieces[number].rows.stop - pieces[number].rows.start, 1),
                    )
                else:
                    edges.receive(Cargo.GRADIENTS, number)
        if one is None:
            break
        if posted is not None:
            posted.wait()
        count = len(step.pieces[one.microbatch]) if one.place == 0 else 0
        own = [numbers[one.microbatch, piece] for piece in range(count)]
        if one.forward and one.place == 0:
            came = [edges.receive(Cargo.FEATURES, number) for number in own]
            needed[one.microbatch] = carrier.dealt(one.microbatch, came)
        queues.meet(step.lanes[stage])  # a tensor parallel group, or parts of a sequence
        if not one.forward and one.place == 0 and step.encoder.trains:
            gradient = needed.pop(one.microbatch)
            held_back = carrier.collected(one.microbatch, own, gradient)
            for number, part in zip(own, held_back, strict=True):
                edges.send(Cargo.GRADIENTS, number, part)
        pipeline_output(step, replica, one, queues=queues)
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


def pipeline_input(step: Step, replica: int, one: DecoderPass, *, queues: Queues) -> Sent | None:
    before = step.before(one)
    if before is None or (source := peer(step, replica, before)) == replica:
        return None
    return queues.irecv(torch.zeros(1), src=source, group=group_of(step, before))


def pipeline_output(step: Step, replica: int, one: DecoderPass, *, queues: Queues) -> None:
    behind = step.behind.get(one)
    if behind is not None and (target := peer(step, replica, behind)) != replica:
        queues.isend(torch.zeros(1), dst=target, group=group_of(step, one))


def drawn(
    step: Step,
    plan: EncoderPlan,
    *,
    window: int = 2,
    cp: int = 1,
    chunked: bool = False,
) -> Queues:
    """All ranks' step, by real wires and the names of their groups.

    The lanes of a stage are those of so many context parts; ``chunked``: with sequence parallelism.
    """
    lanes, ranks = step.lanes[0], range(len(step.replicas))
    edge = Edge(replicas=tuple((rank,) for rank in ranks), consumers=lanes)
    owners, tp = owners_of(plan), len(lanes) // cp
    # Of each part of the sequence, a piece has as many rows as its number says.
    sizes = [cp * (number + 1) for number in range(len(step.names))]
    units = [
        [size for size, (unit, _) in zip(sizes, step.names, strict=True) if unit == number]
        for number in range(len(step.pieces))
    ]
    ends = [[*accumulate(each, initial=0)] for each in units]
    pieces = [
        Piece(
            microbatch=unit,
            media=range(0),
            rows=slice(ends[unit][place], ends[unit][place + 1]),
            replica=owners[unit, place],
        )
        for unit, place in step.names
    ]
    number = cp * tp if chunked else cp
    spec = ExchangeSpec(
        tokens=tuple(map(sum, units)),
        shares=((Share(encoder_replica=0),),) * len(units),
        width=1,
        dtype=torch.float32,
        shards=tuple(_shards(each, cp=cp, chunks=number // cp) for each in units)
        if number > 1
        else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        queues = Queues(patch)
        patch.setattr(wire, "WINDOW", window)
        for rank in ranks:
            queues.turn_to(rank)
            group: Any = edge.consumers if rank in edge.consumers else None
            carrier = Carrier(
                wire=Wire(GROUPS, most=inf, device=CPU),
                deals=None if group is None else Dealer(group),
                shares=None,
                crossings=lambda *_: None,
            )
            crossings = streamed_crossings(pieces, spec, edge=edge, cp=cp, rank=rank)
            carrier.begin(crossings, trains=step.encoder.trains)
            drive(carrier, rank, step=step, plan=plan, queues=queues, pieces=pieces)
    return queues


def _shards(sizes: Sequence[int], *, cp: int, chunks: int) -> tuple[tuple[slice, ...], ...]:
    """A piece's rows lie in one part of the sequence after the other, in its first chunk."""
    found: list[list[slice]] = [[] for _ in range(cp * chunks)]
    start = 0
    for size in sizes:
        for part in range(cp):
            found[part * chunks].append(slice(start, start + size // cp))
            start += size // cp
    return tuple(map(tuple, found))


def owners_of(plan: EncoderPlan) -> dict[tuple[int, int], int]:
    """Which replica encodes a piece."""
    return {
        name: replica for replica, work in enumerate(plan) for one in work for name in one.pieces
    }


@given(steps(), st.integers(1, 5), st.booleans(), st.booleans())
@settings(deadline=None)
def test_every_pair_has_one_order_in_each_direction(
    step: Step, window: int, fills: bool, chunked: bool
) -> None:
    """A message's rows are the number of its piece: queues of one stream cannot cross."""
    plan = (filled(step) if fills else None) or separated(step)
    queues = drawn(step, plan, window=window, chunked=chunked)
    sent, posted = queues.rows[True], queues.rows[False]
    assert sent == posted
    for (*_, name), rows in sent.items():
        assert rows == sorted(rows) or name not in OF_PIECES
    assert len({communicator(stream) for stream in sent}) == len(sent)
    # Of the features, what the first stage has not made itself: once.
    count = sum(len(rows) for (*_, name), rows in sent.items() if name == GROUPS[Cargo.FEATURES])
    assert count == sum(owner not in step.lanes[0] for owner in owners_of(plan).values())
    assert ends(queues.programs())


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_device_with_one_queue_hangs(window: int) -> None:
    """Whatever is done about receives: a second gradient sets out before the first is taken."""
    for stages, percent in ((2, 30), (8, 20)):
        step = even(stages, percent=percent)
        for plan in (filled(step), separated(step)):
            assert plan is not None
            programs = drawn(step, plan, window=window).programs()
            assert ends(programs)
            assert not ends(programs, one_queue=True)


# Tensor parallel, context parallel and pipeline parallel sizes.
SIZES = [
    (tp, cp, pp) for tp, cp, pp in product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8)) if tp * cp * pp <= 64
]


@pytest.mark.parametrize(("tp", "cp", "pp"), SIZES)
def test_no_layout_hangs_on_32_streams(tp: int, cp: int, pp: int) -> None:
    """As torch hands them out in turn: behind the 32nd communicator the first stream again."""
    step = even(pp, percent=40, lanes=tp * cp, microbatches=2 * pp, count=max(4, tp))
    fills = streamed(step, otherwise=2**62)  # whether or not it is faster
    for plan, chunked in ((fills, True), (separated(step), False)):
        assert plan is not None
        queues = drawn(step, plan, cp=cp, chunked=chunked)
        used: dict[int, set[Any]] = defaultdict(set)
        for stream in queues.rows[True]:
            for rank in stream[:2] if stream[2] in OF_PIECES else ():
                used[rank].add(communicator(stream))
        assert max(map(len, used.values()), default=0) <= 2 * pp * cp
        order(on_streams(queues.programs(), communicator=communicator, pool=32))


def test_a_pool_that_is_too_small_is_a_circle_with_names() -> None:
    """So the model of streams can hang at all."""
    step = even(4, percent=40, lanes=4, microbatches=8)
    plan = filled(step)
    assert plan is not None
    programs = on_streams(drawn(step, plan).programs(), communicator=communicator, pool=2)
    with pytest.raises(Deadlock, match=r"rank \d+ waits for rank \d+ to (send|receive) .*for ever"):
        order(programs)


@pytest.mark.quick
def test_a_piece_out_of_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge(replicas=((0,), (1,)), consumers=(0,))
    units = ExchangeSpec(
        tokens=(1, 1), shares=((Share(encoder_replica=1),),) * 2, width=1, dtype=torch.float32
    )
    pieces = [
        Piece(microbatch=each, media=range(0), rows=slice(0, 1), replica=1) for each in range(2)
    ]
    Queues(monkeypatch).turn_to(0)
    edges = Wire(GROUPS, most=inf, device=CPU)
    edges.windows[Cargo.FEATURES] = 1
    crossings = streamed_crossings(pieces, units, edge=edge, cp=1, rank=0)
    edges.begin({Cargo.FEATURES: crossings.of_step(Cargo.FEATURES)})
    with pytest.raises(AssertionError, match="is not the next of features"):
        edges.receive(Cargo.FEATURES, 1)
    edges.receive(Cargo.FEATURES, 0)
    with pytest.raises(AssertionError, match="nobody took features"):
        edges.drain()
