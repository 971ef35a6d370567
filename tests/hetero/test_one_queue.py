"""Encoders on ranks of their own where a GPU takes all of its work from one queue: who hangs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from one_queue import ROW, Queue, Queued, finish
from placed import ENCODER
from stock_passes import Chunk, step_of_megatron

from loongplug.data.microbatch import Share
from loongplug.hetero import edge, stage_links
from loongplug.hetero.edge import WINDOW, Edges, Transport
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import (
    BEGIN,
    GatherFeatures,
    GiveBack,
    HandOn,
    ScatterGradients,
    TakeBack,
    TakeStates,
)
from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pipeline_graph import ahead, in_flight, warmup
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.policies import EncoderStep, apart
from loongplug.hetero.stage_links import StageLink, StageLinks, StageUnit
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick

HOST = torch.device("cpu")


class Took(torch.autograd.Function):
    """A place where features are taken, and behind whose backward their gradient is there."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, take: Callable[[], None], give: Callable[[], None]
    ) -> torch.Tensor:
        take()
        ctx.give = give
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.give()
        return gradient, None, None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An encoder, and what it has of the messages of a step."""

    number: int
    stages: int
    first_rank: int
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
        window: int = WINDOW,
    ) -> None:
        """``decoder`` and ``encoders`` are the stages of all; each is one rank.

        ``chunks``: virtual stages of each of the decoder's. ``overlap``: with their passes beside
        what is sent.
        """
        self._patch = patch
        self._pipeline = Pipeline(stages=decoder, stage=0, chunks=chunks, group=decoder)
        self._overlap = overlap
        self._microbatches = microbatches
        self._window = window
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
                Placed(number=number, stages=stages, first_rank=offset, pieces=pieces)
            )
            offset += stages
        self._units = ExchangeSpec(
            tokens=(1,) * microbatches,
            shares=((Share(encoder_replica=0),),) * microbatches,
            width=1,
            dtype=ROW.dtype,
            row_tokens=((1,),) * microbatches,
        )

    def finish(self, *, less: int = 0) -> bool:
        """Whether a step ends; ``less``: with so many forwards of the encoders fewer ahead."""
        queues = [self._decoders(rank) for rank in range(self._pipeline.stages)]
        queues += [
            self._encoders(encoder, stage, less=less)
            for encoder in self._placed
            for stage in range(encoder.stages)
        ]
        return finish({queue.rank: queue.given for queue in queues})

    def _queue(self, rank: int) -> Queue:
        queue = Queue(rank)
        for module in (edge, stage_links):
            self._patch.setattr(module, "dist", queue)
        return queue

    def _edges(self, encoder: Placed, stage: int) -> Edges:
        """Of a stage of the encoder; on the decoder's ranks of the last one."""
        groups: dict[str, object] = {
            "there": f"features {encoder.number}",
            "back": f"gradients {encoder.number}",
            "together": None,
        }
        return Edges(
            encoder.pieces,
            Transport(**groups),  # type: ignore[arg-type]
            window=self._window,
            in_flight=self._in_flight(encoder, stage),
            device=HOST,
        )

    def _in_flight(self, encoder: Placed, stage: int) -> int:
        return in_flight(ahead=self._ahead, stages=encoder.stages, stage=stage)

    def _decoders(self, rank: int) -> Queue:
        """What a rank of the decoder does under Megatron's schedule."""
        queue = self._queue(rank)
        edges = [self._edges(each, each.stages - 1) for each in self._placed] if rank == 0 else []
        for each in edges:
            each.begin(self._units, trains=True)

        def output(chunk: Chunk, number: int) -> torch.Tensor:
            made = chunk.state()
            unit = self._unit(number)
            for each in edges if chunk.number == 0 else ():
                take = partial(each.gather_variable_shape_embeddings, {}, unit)
                give = partial(each.scatter_variable_shape_embeddings, {0: ROW}, unit)
                made = Took.apply(made, take, give)
            return made

        step_of_megatron(
            replace(self._pipeline, stage=rank),
            self._microbatches,
            output=output,
            communicator=partial(Queued, queue=queue),
            overlap=self._overlap,
        )
        for each in edges:
            each.drain()
        return queue

    def _encoders(self, encoder: Placed, stage: int, *, less: int) -> Queue:
        """What a stage of the encoder does by its plan."""
        queue = self._queue(encoder.first_rank + stage)
        edges = self._edges(encoder, stage)
        links = StageLinks(
            before=self._link(encoder, stage, stage - 1) if stage else None,
            behind=self._link(encoder, stage, stage + 1) if stage < encoder.stages - 1 else None,
            window=self._window,
            in_flight=self._in_flight(encoder, stage),
            device=HOST,
        )
        units = [StageUnit(rows=1, microbatch=number) for number in range(self._microbatches)]
        edges.begin(self._units, trains=True)
        links.begin(units, dtype=ROW.dtype, comes_back=stage < encoder.stages - 1)
        for each in apart(self._step(encoder, stage, less=less))[BEGIN]:
            match each:
                case TakeStates(unit=unit):
                    links.take(unit)
                case HandOn(unit=unit):
                    links.hand_on(unit, ROW)
                case TakeBack(unit=unit):
                    links.take_back(unit)
                case GiveBack(unit=unit):
                    links.give_back(unit, ROW)
                case GatherFeatures(units=range(start=unit)):
                    edges.gather_variable_shape_embeddings({0: ROW}, self._unit(unit))
                case ScatterGradients(units=range(start=unit)):
                    edges.scatter_variable_shape_embeddings({}, self._unit(unit))
        edges.drain()
        links.drain()
        return queue

    def _step(self, encoder: Placed, stage: int, *, less: int) -> EncoderStep:
        forwards = warmup(
            microbatches=self._microbatches,
            ahead=self._ahead,
            stages=encoder.stages,
            stage=stage,
        )
        return EncoderStep(
            encoder_replicas=((0,),) * self._microbatches,
            replicas=1,
            replica=0,
            consumes=False,
            training=True,
            trains=True,
            trains_before=stage > 0,
            last_stage=False,
            warmup=max(0, forwards - less),
            stage=stage,
            stages=encoder.stages,
        )

    def _link(self, encoder: Placed, stage: int, other: int) -> StageLink:
        boundary = min(stage, other)
        groups: dict[str, object] = {
            "there": f"states {encoder.number} {boundary}",
            "back": f"back {encoder.number} {boundary}",
        }
        return StageLink(peer=encoder.first_rank + other, width=1, **groups)  # type: ignore[arg-type]

    def _unit(self, number: int) -> ExchangeSpec:
        return self._units.part(range(number, number + 1))


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
        window=WINDOW + 1,
    )
    assert not ranks.finish()
