"""Encoders on ranks of their own where a GPU's work waits in queues: who hangs.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, all of a rank's work goes through one queue: a receive that
is posted ahead holds up what follows, where another one stands before it on the same stream. Else
each communicator has a stream of a pool of 32, which two share where a rank has more.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from placed import ENCODER

from loongplug.data.microbatch import Share
from loongplug.hetero import dealing, exchange, wire
from loongplug.hetero.carrier import Carrier, StageSpec, stage_links
from loongplug.hetero.communicators import apart_pairs, count, there_and_back
from loongplug.hetero.crossings import apart_crossings
from loongplug.hetero.dealing import Dealer
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.encoder_steps import EncoderStep
from loongplug.hetero.operations import (
    BEGIN,
    Backward,
    Cargo,
    Encode,
    Receive,
    Send,
)
from loongplug.hetero.pass_order import Pass, Pipeline, Turn, ahead, warmup
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.policies import apart
from loongplug.hetero.recorded_schedule import Posted, StageEnd, Waited, calls
from loongplug.hetero.routes import ExchangeSpec
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, Meet, Post, Programs, Wait
from loongplug.simulate.wires import on_streams

pytestmark = pytest.mark.quick

HOST = torch.device("cpu")
ROW = torch.zeros(1, 1)


class Queue:
    """Stands in for ``torch.distributed`` on one rank, and keeps what the rank gives its GPU."""

    def __init__(self, rank: int, build: Build) -> None:
        self.rank, self.given = rank, list[Act]()
        self._build, self._counts = build, Counter[tuple[int, int, str]]()

    def get_rank(self) -> int:
        return self.rank

    def get_process_group_ranks(self, group: Sequence[int]) -> Sequence[int]:
        return group

    def isend(self, rows: torch.Tensor, *, dst: int, group: str) -> "Sent":
        return self._message((self.rank, dst, group), sends=True)

    def irecv(self, rows: torch.Tensor, *, src: int, group: str) -> "Sent":
        return self._message((src, self.rank, group), sends=False)

    def all_to_all_single(self, rows: Any, out: Any, coming: Any, given: Any, group: Any) -> None:
        self.meet(group)

    def broadcast(self, rows: torch.Tensor, *, src: int, group: Any) -> None:
        self.meet(group)

    def meet(self, group: Sequence[int]) -> None:
        if len(group) > 1:
            self.given.append(Meet(self._build.group(group)))

    def _message(self, stream: tuple[int, int, str], *, sends: bool) -> "Sent":
        message = self._build.message(stream, self._counts[stream], eager=False)
        self._counts[stream] += 1
        self.given.append(Post(((message, sends),)))
        return Sent(self, Wait(((message, sends),)))


@dataclass(frozen=True)
class Sent:
    """A message on the queue."""

    queue: Queue
    waits: Wait

    def is_completed(self) -> bool:
        """As gloo says it; who waits for it to be so has what stands behind wait."""
        return self.waits in self.queue.given

    def wait(self) -> None:
        self.queue.given.append(self.waits)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An encoder, and what it has of the messages of a step."""

    number: int
    layout: Layout
    pieces: tuple[ApartPiece, ...]


class Ranks:
    """A decoder's ranks and behind them those of encoders, and what each gives its queue."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        decoder: Layout,
        encoders: Sequence[Layout],
        microbatches: int,
        samples: int = 1,
        split: bool = False,
        chunks: int = 1,
        overlap: bool = False,
        more: int = 0,
        without: Sequence[int] = (),
    ) -> None:
        """A microbatch has so many ``samples``; ``split``: with sequence parallelism.

        ``chunks``: virtual stages of each of the decoder's. ``overlap``: with their passes beside
        what is sent. ``without``: microbatches without rows. ``more``: so many more pieces are
        received ahead.
        """
        self._patch = patch
        self._decoder = decoder
        self._pipeline = Pipeline(stages=decoder.pp, stage=0, chunks=chunks, group=decoder.pp)
        self._overlap = overlap
        self._microbatches = microbatches
        self._samples, self._split = samples, split
        self._more = more
        self._ahead = ahead(pipeline=decoder.pp, virtual=chunks > 1)
        self._placed = []
        offset = decoder.world_size
        for number, each in enumerate(encoders):
            entry = replace(ENCODER, name=f"encoder {number}")
            sizes = {"tp": each.tp, "dp": each.dp, "pp": each.pp}
            placement = one_apart(decoder, entry=entry, rank_offset=offset, **sizes)
            self._placed.append(
                Placed(
                    number=number,
                    layout=placement.entry(entry.name).layout,
                    pieces=placement.pieces(entry.name, micro_batch_size=samples),
                )
            )
            offset += each.world_size
        self._rows = tuple(int(number not in without) for number in range(microbatches))

    def programs(self, *, less: int = 0) -> Programs:
        """Of all ranks; ``less``: with so many forwards of the encoders fewer ahead."""
        self._build = Build()
        acts = [self._decoders(rank) for rank in self._decoder.ranks]
        acts += [
            self._encoders(encoder, rank, less=less)
            for encoder in self._placed
            for rank in encoder.layout.ranks
        ]
        return self._build.programs(acts)

    def finish(self, *, less: int = 0) -> bool:
        """Whether a step ends that goes through one queue of each rank."""
        programs = self.programs(less=less)
        try:
            order(on_streams(programs, communicator=lambda stream: stream, one_queue=True))
        except Deadlock:
            return False
        return True

    def most(self) -> int:
        """The communicators of the rank that has most between encoders and the decoder."""
        pairs = [there_and_back(apart_pairs(each.pieces, cp=1)) for each in self._placed]
        return max(count(group for each in pairs for group in each).values())

    def _queue(self, rank: int) -> Queue:
        queue = Queue(rank, self._build)
        for module in (dealing, exchange, wire):
            self._patch.setattr(module, "dist", queue)
        return queue

    def _carrier(self, encoder: Placed, rank: int) -> Carrier:
        """Of a rank of the encoder, or of the decoder's first stage."""
        layout, decoder = encoder.layout, self._decoder
        here = rank in layout.ranks
        groups: Any = {what: f"{what.name} {encoder.number}" for what in Cargo}
        links = stage_links(layout, rank, widths=[1] * (layout.pp - 1))
        last = not any(each.source == rank for each in links)
        tp_group: Any = tuple((layout if here else decoder).group("tp", rank))
        carrier = Carrier(
            wire=Wire(groups, most=self._in_flight(encoder, rank), device=HOST),
            deals=None if here else Dealer(tp_group),
            shares=Dealer(tp_group) if here and last else None,
            crossings=lambda *_: None,
            links=links,
        )
        for what in carrier.wire.windows:
            carrier.wire.windows[what] += 0 if what.back else self._more
        return carrier

    def _in_flight(self, encoder: Placed, rank: int) -> int:
        layout = encoder.layout
        stage = layout.coordinates(rank).pp if rank in layout.ranks else layout.pp - 1
        return 1 + warmup(ahead=self._ahead, stages=layout.pp, stage=stage)

    def _begin(self, carrier: Carrier, encoder: Placed, rank: int) -> None:
        samples = [range(self._samples)]
        if rank in encoder.layout.ranks:
            samples = [each.samples for each in self._made(encoder, rank)]
        row_tokens = [(rows,) * len(each) for rows in self._rows for each in samples]
        tokens = tuple(map(sum, row_tokens))
        chunks = self._decoder.tp if self._split else 1
        nothing: tuple[tuple[slice, ...], ...] = ((),) * (chunks - 1)
        units = ExchangeSpec(
            tokens=tokens,
            shares=((Share(encoder_replica=0),),) * len(tokens),
            width=1,
            dtype=ROW.dtype,
            shards=tuple(((slice(0, each),), *nothing) for each in tokens) if chunks > 1 else None,
            row_tokens=tuple(row_tokens),
        )
        states = None
        if encoder.layout.pp > 1 and rank in encoder.layout.ranks:
            numbers = range(len(tokens))
            states = StageSpec(
                rows=tokens,
                microbatches=tuple(number // len(samples) for number in numbers),
                dtype=ROW.dtype,
            )
        crossings = apart_crossings(encoder.pieces, units, cp=1, rank=rank)
        carrier.begin(crossings, states, trains=True)

    def _made(self, encoder: Placed, rank: int) -> list[ApartPiece]:
        replica = encoder.layout.coordinates(rank).dp
        return [each for each in encoder.pieces if each.replica == replica]

    def _decoders(self, rank: int) -> list[Act]:
        """What a rank of the decoder does under Megatron's schedule."""
        queue, place = self._queue(rank), self._decoder.coordinates(rank)
        tp_group, pipeline = self._decoder.group("tp", rank), self._decoder.group("pp", rank)
        carriers = [self._carrier(each, rank) for each in self._placed] if place.pp == 0 else []
        for each, encoder in zip(carriers, self._placed, strict=False):
            self._begin(each, encoder, rank)
        posted: dict[StageEnd, Sent] = {}
        needed: dict[int, list[torch.Tensor]] = {}
        stage = replace(self._pipeline, stage=place.pp)
        for call in calls(stage, self._microbatches, beside_sends=self._overlap):
            match call:
                case Posted(ends=ends):
                    for way in ends:
                        peer = pipeline[(place.pp + (1 if way.to_next else -1)) % len(pipeline)]
                        # States and gradients of virtual stages alike are one stream of two ranks.
                        posted[way] = (
                            queue.isend(ROW, dst=peer, group="decoder")
                            if way.sends
                            else queue.irecv(ROW, src=peer, group="decoder")
                        )
                case Waited(ends=ends):
                    for way in ends:
                        posted[way].wait()
                case Turn(forward=Pass(chunk=0, microbatch=number)):
                    needed[number] = [
                        each.dealt(number, [each.wire.receive(Cargo.FEATURES, number)])
                        for each in carriers
                    ]
                    queue.meet(tp_group)
                case Turn(backward=Pass(chunk=0, microbatch=number)):
                    queue.meet(tp_group)
                    for each, gradient in zip(carriers, needed.pop(number), strict=True):
                        (held,) = each.collected(number, (number,), gradient)
                        each.wire.send(Cargo.GRADIENTS, number, held)
                case Turn():
                    queue.meet(tp_group)
        for each in carriers:
            each.wire.drain()
        return queue.given

    def _encoders(self, encoder: Placed, rank: int, *, less: int) -> list[Act]:
        """What a rank of the encoder does by its plan."""
        queue, tp_group = self._queue(rank), encoder.layout.group("tp", rank)
        carrier, made = self._carrier(encoder, rank), self._made(encoder, rank)
        self._begin(carrier, encoder, rank)
        came: dict[int, torch.Tensor] = {}
        for each in apart(self._step(encoder, rank, less=less)).get(BEGIN, ()):
            match each:
                case Send(what=what, piece=piece):
                    microbatch, number = divmod(piece, len(made))
                    rows = self._rows[microbatch] * len(made[number].samples)
                    carrier.wire.send(what, piece, torch.zeros(rows, 1))
                case Receive(what=what, piece=piece):
                    came[piece] = carrier.wire.receive(what, piece)
                case Encode():
                    queue.meet(tp_group)
                case Backward(pieces=(piece,) as pieces):
                    carrier.shared(pieces, came.pop(piece))
                    queue.meet(tp_group)
        carrier.wire.drain()
        return queue.given

    def _step(self, encoder: Placed, rank: int, *, less: int) -> EncoderStep:
        count = self._microbatches * len(self._made(encoder, rank))
        place = EncoderPlace(
            state=None, replica_group=None, layout=encoder.layout, pieces={True: encoder.pieces}
        )
        step = place.step(
            rank,
            training=True,
            ahead=self._ahead,
            encoder_replicas=((0,),) * count,
            trains=True,
            trains_before=encoder.layout.coordinates(rank).pp > 0,
            last_stage=False,
        )
        return replace(step, warmup=max(0, step.warmup - less))


# Stages of a decoder and of its encoders, virtual stages of each of the decoder's, and whether
# their passes go on beside what is sent.
GRAPHS = [
    *((decoder, (stages,), 1, False) for decoder, stages in product((1, 2, 3), (1, 2, 3))),
    *((decoder, (2, 1), 1, False) for decoder in (1, 2, 3)),
    *((2, encoders, 2, overlap) for encoders in ((1,), (2, 1)) for overlap in (False, True)),
    *((3, (1,), 2, True), (2, (2,), 3, True)),
]


@pytest.mark.parametrize(("decoder", "encoders", "chunks", "overlap"), GRAPHS)
def test_no_step_hangs_and_one_less_is_too_few(
    monkeypatch: pytest.MonkeyPatch,
    decoder: int,
    encoders: tuple[int, ...],
    chunks: int,
    overlap: bool,
) -> None:
    each = range(1, 8) if chunks == 1 else range(decoder, 4 * decoder + 1, decoder)
    for microbatches in each:
        ranks = Ranks(
            monkeypatch,
            decoder=Layout(pp=decoder),
            encoders=[Layout(pp=stages) for stages in encoders],
            microbatches=microbatches,
            chunks=chunks,
            overlap=overlap,
        )
        assert ranks.finish(), microbatches
        forwards = ahead(pipeline=decoder, virtual=chunks > 1)
        assert ranks.finish(less=1) == (microbatches < forwards + 2), microbatches


@pytest.mark.parametrize("chunks", [1, 2])
def test_receives_that_are_posted_earlier_hang(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    ranks = Ranks(
        monkeypatch,
        decoder=Layout(pp=2),
        encoders=[Layout(pp=2)],
        microbatches=8,
        chunks=chunks,
        more=1,
    )
    assert not ranks.finish()


@pytest.mark.parametrize("encoders", [(1,), (2,)])
def test_microbatches_without_rows_count_as_received_ahead(
    monkeypatch: pytest.MonkeyPatch, encoders: tuple[int, ...]
) -> None:
    """Else a receive of a later one would hold up the gradient of an earlier one."""
    for without in (range(1, 4), range(1, 5), range(2, 6), range(4, 9)):
        ranks = Ranks(
            monkeypatch,
            decoder=Layout(pp=2),
            encoders=[Layout(pp=stages) for stages in encoders],
            microbatches=12,
            without=[*without],
        )
        assert ranks.finish(), without


def drawn() -> Iterator[tuple[Layout, Layout, int]]:
    """A decoder, an encoder with other sizes, and the samples of a microbatch."""
    for tp, pp in product((2, 4, 8), (1, 2, 4, 8)):
        yield Layout(tp=tp, pp=pp), Layout(dp=4), 4
        yield Layout(tp=tp, pp=pp), Layout(tp=2, pp=2, dp=2), 2
    for tp in (2, 8):
        yield Layout(tp=tp, dp=4), Layout(), 1
        yield Layout(tp=tp, pp=2, dp=3), Layout(tp=2, dp=2), 2
    yield Layout(tp=8), Layout(dp=32), 32


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("decoder", "encoder", "samples"), drawn())
def test_no_layout_hangs_on_32_streams_or_in_one_queue(
    monkeypatch: pytest.MonkeyPatch, decoder: Layout, encoder: Layout, samples: int, split: bool
) -> None:
    """Streams are handed out in turn: behind the 32nd communicator the first one again."""
    ranks = Ranks(
        monkeypatch,
        decoder=decoder,
        encoders=[encoder],
        microbatches=decoder.pp + 3,
        samples=samples,
        split=split,
    )
    assert ranks.most() <= 24
    order(on_streams(ranks.programs(), communicator=lambda stream: stream, pool=32))
    assert ranks.finish()
