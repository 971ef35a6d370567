"""Encoders on ranks of their own where a GPU takes all of its work from one queue: who hangs."""

from itertools import product

import pytest
import torch
from one_queue import Queue, finish
from placed import ENCODER
from simulated import calls

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
from loongplug.hetero.pipeline_graph import ahead, in_flight, warmup
from loongplug.hetero.placement import one_apart
from loongplug.hetero.policies import EncoderStep, apart
from loongplug.hetero.stage_links import StageLink, StageLinks, StageUnit
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick

ROW = torch.zeros(1, 1)
HOST = torch.device("cpu")


class Ranks:
    """A decoder's ranks and behind them those of an encoder, and what each gives its queue."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        decoder: int,
        stages: int,
        microbatches: int,
        window: int = WINDOW,
    ) -> None:
        """``decoder`` and ``stages`` are the stages of both; each is one rank."""
        self._patch = patch
        self._decoder, self._stages, self._microbatches = decoder, stages, microbatches
        self._window = window
        placement = one_apart(
            Layout(pp=decoder), entry=ENCODER, tp=1, dp=1, pp=stages, rank_offset=decoder
        )
        self._pieces = placement.pieces(ENCODER.name, micro_batch_size=1)
        self._units = ExchangeSpec(
            tokens=(1,) * microbatches,
            shares=((Share(encoder_replica=0),),) * microbatches,
            width=1,
            dtype=ROW.dtype,
            row_tokens=((1,),) * microbatches,
        )

    def finish(self, *, less: int = 0) -> bool:
        """Whether a step ends; ``less``: with so many forwards of the encoder fewer ahead."""
        queues = {rank: self._decoders(rank) for rank in range(self._decoder)}
        for stage in range(self._stages):
            queues[self._decoder + stage] = self._encoders(stage, less=less)
        return finish({rank: queue.given for rank, queue in queues.items()})

    def _edges(self, rank: int) -> tuple[Queue, Edges]:
        queue = Queue(rank)
        for module in (edge, stage_links):
            self._patch.setattr(module, "dist", queue)
        groups: dict[str, object] = {"there": "features", "back": "gradients", "together": None}
        transport = Transport(**groups)  # type: ignore[arg-type]
        most = self._in_flight(max(0, rank - self._decoder))
        return queue, Edges(
            self._pieces, transport, window=self._window, in_flight=most, device=HOST
        )

    def _in_flight(self, stage: int) -> int:
        return in_flight(
            ahead=ahead(pipeline=self._decoder, virtual=False), stages=self._stages, stage=stage
        )

    def _decoders(self, rank: int) -> Queue:
        """What a rank of the decoder does under Megatron's 1F1B, which waits for all it begins."""
        queue, edges = self._edges(rank)
        if rank == 0:
            edges.begin(self._units, trains=True)
        there = back = 0
        behind = self._decoder - 1 - rank
        for call in calls(warmup=min(behind, self._microbatches), microbatches=self._microbatches):
            works = []
            if behind and "send_forward" in call.name:
                works.append(queue.isend(ROW, dst=rank + 1, group="decoder"))
            if behind and "recv_backward" in call.name:
                works.append(queue.irecv(ROW, src=rank + 1, group="decoder"))
            if rank and "send_backward" in call.name:
                works.append(queue.isend(ROW, dst=rank - 1, group="decoder"))
            if rank and "recv_forward" in call.name:
                works.append(queue.irecv(ROW, src=rank - 1, group="decoder"))
            for work in works:
                work.wait()
            if rank == 0 and "recv_backward" in call.name:
                edges.scatter_variable_shape_embeddings({0: ROW}, self._unit(back))
                back += 1
            if rank == 0 and "recv_forward" in call.name:
                edges.gather_variable_shape_embeddings({}, self._unit(there))
                there += 1
        if rank == 0:
            edges.drain()
        return queue

    def _encoders(self, stage: int, *, less: int) -> Queue:
        """What a stage of the encoder does by its plan."""
        queue, edges = self._edges(self._decoder + stage)
        links = StageLinks(
            before=self._link(stage, stage - 1) if stage else None,
            behind=self._link(stage, stage + 1) if stage < self._stages - 1 else None,
            window=self._window,
            in_flight=self._in_flight(stage),
            device=HOST,
        )
        units = [StageUnit(rows=1, microbatch=number) for number in range(self._microbatches)]
        edges.begin(self._units, trains=True)
        links.begin(units, dtype=ROW.dtype, comes_back=stage < self._stages - 1)
        for each in apart(self._step(stage, less=less))[BEGIN]:
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

    def _step(self, stage: int, *, less: int) -> EncoderStep:
        forwards = warmup(
            microbatches=self._microbatches,
            ahead=ahead(pipeline=self._decoder, virtual=False),
            stages=self._stages,
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
            stages=self._stages,
        )

    def _link(self, stage: int, other: int) -> StageLink:
        boundary = min(stage, other)
        groups: dict[str, object] = {"there": f"states {boundary}", "back": f"back {boundary}"}
        return StageLink(peer=self._decoder + other, width=1, **groups)  # type: ignore[arg-type]

    def _unit(self, number: int) -> ExchangeSpec:
        return self._units.part(range(number, number + 1))


GRAPHS = [*product((1, 2, 3), (1, 2, 3))]  # stages of a decoder and of an encoder


@pytest.mark.parametrize(("decoder", "stages"), GRAPHS)
def test_no_step_hangs_and_one_less_is_too_few(
    monkeypatch: pytest.MonkeyPatch, decoder: int, stages: int
) -> None:
    for microbatches in range(1, 8):
        ranks = Ranks(monkeypatch, decoder=decoder, stages=stages, microbatches=microbatches)
        assert ranks.finish(), microbatches
        assert ranks.finish(less=1) == (microbatches < decoder + 2), microbatches


def test_receives_that_are_posted_earlier_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, decoder=2, stages=2, microbatches=7, window=WINDOW + 1)
    assert not ranks.finish()
