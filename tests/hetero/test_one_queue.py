"""Encoders on ranks of their own where a GPU takes all of its work from one queue: who hangs.

So it is with ``CUDA_DEVICE_MAX_CONNECTIONS=1``: a receive that is posted ahead holds up what
follows, where another one stands before it on the same stream.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from loongplug.hetero.edge import Transport, apart_wire
from placed import ENCODER

from loongplug.data.microbatch import Share
from loongplug.hetero import edge, stage_links, wire
from loongplug.hetero.encoder_steps import encoder_step
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.modes import APART
from loongplug.hetero.operations import (
    BEGIN,
    Cargo,
    Receive,
    Send,
)
from loongplug.hetero.pass_order import Pass, Pipeline, Turn
from loongplug.hetero.pipeline_graph import ahead, in_flight
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.policies import EncoderStep, apart
from loongplug.hetero.recorded_schedule import Posted, StageEnd, Waited, calls
from loongplug.hetero.stage_links import StageLink, StageSpec, stage_wire
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, Post, Wait
from loongplug.simulate.wires import on_streams

pytestmark = pytest.mark.quick

HOST = torch.device("cpu")
ROW = torch.zeros(1, 1)
OF_STAGES = (Cargo.STATES, Cargo.STATE_GRADIENTS)


class Queue:
    """Stands in for ``torch.distributed`` on one rank, and keeps what the rank gives its GPU."""

    def __init__(self, rank: int, build: Build) -> None:
        self.rank, self.given = rank, list[Act]()
        self._build, self._counts = build, Counter[tuple[int, int, str]]()

    def get_rank(self) -> int:
        return self.rank

    def isend(self, rows: torch.Tensor, *, dst: int, group: str) -> "Sent":
        return self._message((self.rank, dst, group), sends=True)

    def irecv(self, rows: torch.Tensor, *, src: int, group: str) -> "Sent":
        return self._message((src, self.rank, group), sends=False)

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
    stages: int
    first_rank: int
    layout: Layout
    pieces: tuple[ApartPiece, ...]


class Ranks:
    """A decoder's ranks and behind them those of encoders, and what each gives its queue."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        decoder: int,
        encoders: Sequence[int],
        microbatches: int,
        chunks: int = 1,
        overlap: bool = False,
        more: int = 0,
        without: Sequence[int] = (),
    ) -> None:
        """``decoder`` and ``encoders`` are the stages of all; each is one rank.

        ``chunks``: virtual stages of each of the decoder's. ``overlap``: with their passes beside
        what is sent. ``without``: microbatches without rows. ``more``: so many more pieces are
        received ahead.
        """
        self._patch = patch
        self._pipeline = Pipeline(stages=decoder, stage=0, chunks=chunks, group=decoder)
        self._overlap = overlap
        self._microbatches = microbatches
        self._more = more
        self._ahead = ahead(pipeline=decoder, virtual=chunks > 1)
        self._placed = []
        offset = decoder
        for number, stages in enumerate(encoders):
            entry = replace(ENCODER, name=f"encoder {number}")
            placement = one_apart(
                Layout(pp=decoder), entry=entry, tp=1, dp=1, pp=stages, rank_offset=offset
            )
            pieces = placement.pieces(entry.name, micro_batch_size=1)
            self._placed.append(
                Placed(
                    number=number,
                    stages=stages,
                    first_rank=offset,
                    layout=placement.entry(entry.name).layout,
                    pieces=pieces,
                )
            )
            offset += stages
        self._rows = tuple(int(number not in without) for number in range(microbatches))
        self._units = ExchangeSpec(
            tokens=self._rows,
            shares=((Share(encoder_replica=0),),) * microbatches,
            width=1,
            dtype=ROW.dtype,
            row_tokens=tuple((each,) for each in self._rows),
        )

    def finish(self, *, less: int = 0) -> bool:
        """Whether a step ends; ``less``: with so many forwards of the encoders fewer ahead."""
        self._build = Build()
        acts = [self._decoders(rank) for rank in range(self._pipeline.stages)]
        acts += [
            self._encoders(encoder, stage, less=less)
            for encoder in self._placed
            for stage in range(encoder.stages)
        ]
        programs = self._build.programs(acts)
        try:
            order(on_streams(programs, communicator=lambda stream: stream, one_queue=True))
        except Deadlock:
            return False
        return True

    def _queue(self, rank: int) -> Queue:
        queue = Queue(rank, self._build)
        for module in (edge, stage_links, wire):
            self._patch.setattr(module, "dist", queue)
        return queue

    def _edges(self, encoder: Placed, stage: int) -> Wire[ExchangeSpec]:
        """Of a stage of the encoder; on the decoder's ranks of the last one."""
        groups: dict[str, object] = {
            "there": f"features {encoder.number}",
            "back": f"gradients {encoder.number}",
            "together": None,
        }
        edges = apart_wire(
            encoder.pieces,
            Transport(**groups),  # type: ignore[arg-type]
            in_flight=self._in_flight(encoder, stage),
            device=HOST,
        )
        return self._with_more(edges)

    def _with_more[W: Wire](self, wire: W) -> W:
        for what in wire.windows:
            wire.windows[what] += 0 if what.back else self._more
        return wire

    def _in_flight(self, encoder: Placed, stage: int) -> int:
        return in_flight(ahead=self._ahead, stages=encoder.stages, stage=stage)

    def _decoders(self, rank: int) -> list[Act]:
        """What a rank of the decoder does under Megatron's schedule."""
        queue, stages = self._queue(rank), self._pipeline.stages
        edges = [self._edges(each, each.stages - 1) for each in self._placed] if rank == 0 else []
        for each in edges:
            each.begin(self._units, trains=True)
        posted: dict[tuple[int, StageEnd], Sent] = {}
        stage = replace(self._pipeline, stage=rank)
        for place, call in enumerate(calls(stage, self._microbatches, beside_sends=self._overlap)):
            match call:
                case Posted(ways=ways):
                    for way in ways:
                        peer = (rank + (1 if way.to_next else -1)) % stages
                        # States and gradients of virtual stages alike are one stream of two ranks.
                        posted[place, way] = (
                            queue.isend(ROW, dst=peer, group="decoder")
                            if way.sends
                            else queue.irecv(ROW, src=peer, group="decoder")
                        )
                case Waited(posted=at, ways=ways):
                    for way in ways:
                        posted[at, way].wait()
                case Turn(forward=Pass(chunk=0, microbatch=number)):
                    for each in edges:
                        each.receive(Cargo.FEATURES, number)
                case Turn(backward=Pass(chunk=0, microbatch=number)):
                    for each in edges:
                        each.send(Cargo.GRADIENTS, number, self._made(number))
        for each in edges:
            each.drain()
        return queue.given

    def _encoders(self, encoder: Placed, stage: int, *, less: int) -> list[Act]:
        """What a stage of the encoder does by its plan."""
        queue = self._queue(encoder.first_rank + stage)
        edges = self._edges(encoder, stage)
        links = stage_wire(
            before=self._link(encoder, stage, stage - 1) if stage else None,
            behind=self._link(encoder, stage, stage + 1) if stage < encoder.stages - 1 else None,
            in_flight=self._in_flight(encoder, stage),
            device=HOST,
        )
        numbers = tuple(range(self._microbatches))
        spec = StageSpec(rows=self._rows, microbatches=numbers, dtype=ROW.dtype)
        edges.begin(self._units, trains=True)
        self._with_more(links).begin(spec, trains=True)
        for each in apart(self._step(encoder, stage, less=less))[BEGIN]:
            match each:
                case Send(what=what, piece=piece):
                    wire = links if what in OF_STAGES else edges
                    wire.send(what, piece, self._made(piece))
                case Receive(what=what, piece=piece):
                    (links if what in OF_STAGES else edges).receive(what, piece)
        edges.drain()
        links.drain()
        return queue.given

    def _step(self, encoder: Placed, stage: int, *, less: int) -> EncoderStep:
        step = encoder_step(
            APART,
            rank=encoder.first_rank + stage,
            edge=None,
            layout=encoder.layout,
            pieces=encoder.pieces,
            encoder_replicas=((0,),) * self._microbatches,
            training=True,
            trains=True,
            trains_before=stage > 0,
            last_stage=False,
            ahead=self._ahead,
        )
        return replace(step, warmup=max(0, step.warmup - less))

    def _link(self, encoder: Placed, stage: int, other: int) -> StageLink:
        boundary = min(stage, other)
        groups: dict[str, object] = {
            "there": f"states {encoder.number} {boundary}",
            "back": f"back {encoder.number} {boundary}",
        }
        return StageLink(peer=encoder.first_rank + other, width=1, **groups)  # type: ignore[arg-type]

    def _made(self, number: int) -> torch.Tensor:
        return ROW[: self._rows[number]]


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
            decoder=decoder,
            encoders=encoders,
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
        decoder=2,
        encoders=[2],
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
            monkeypatch, decoder=2, encoders=encoders, microbatches=12, without=[*without]
        )
        assert ranks.finish(), without
