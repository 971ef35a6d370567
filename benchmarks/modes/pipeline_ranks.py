"""A rank whose stages sleep: the product's policies and exchanges, Megatron's schedule, no model.

What ranks send one another is as small as can be. Nothing is reduced or updated behind a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.data.microbatch import MediaToCome, Microbatch, Share, Unit
from loongplug.hetero.encoder_place import PlaceOfEncoder
from loongplug.hetero.engine import EncoderEngine, Engine
from loongplug.observe.recorder import TraceRecorder
from loongplug.observe.trace_file import TraceEvent
from loongplug.parallel.states import TEXT_DECODER, adopt_own_ranks, rest_in
from loongplug.partition.clock import StageTime
from loongplug.verify.ranks import OnEvent, join
from modes.pace import Pace
from modes.paced_model import HIDDEN, PacedChunk
from modes.pipeline_work import (
    TOKENS,
    Case,
    PacedEncoder,
    grids_of,
    in_turn,
    media_of,
    paced_costs,
)

EMPTY_STEPS: Final = 2  # without sleep, before the others; the first one makes connections
_MINUTES = 5.0


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What a rank did in steps 1 to ``EMPTY_STEPS``, which are empty, and in those behind.

    ``work`` has the milliseconds of each step that it was asked to sleep.
    """

    place: Mapping[str, int]
    events: tuple[TraceEvent, ...]
    work: tuple[float, ...]


def live(
    rank: int, tell: OnEvent, *, cases: Sequence[Case], steps: int, folder: Path
) -> list[RankFigures]:
    """The life of a rank: of each of ``cases``, which have one place, empty steps and ``steps``."""
    join(rank, folder=folder, device="cpu", minutes=_MINUTES)
    events: list[TraceEvent] = []
    recorder = TraceRecorder(events.extend)
    engine = _engine(cases[0], recorder=recorder)
    _make_groups(cases[0], engine)
    found = []
    for case in cases:
        assert case.site == cases[0].site, (case, cases[0])
        pace = Pace(recorder)
        for step in _steps(case, engine, pace=pace, recorder=recorder, count=EMPTY_STEPS + steps):
            if rank == 0:
                tell(f"step {step}")
        found.append(RankFigures(place=_place(engine), events=tuple(events), work=tuple(pace.work)))
        events.clear()
    dist.barrier()  # a rank that ends early closes its sockets while others still use them
    return found


def _steps(
    case: Case, engine: Engine, *, pace: Pace, recorder: TraceRecorder, count: int
) -> Iterator[int]:
    """Do so many, and give each one's number behind it."""
    chunks = _chunks(case, engine, pace=pace)
    schedule = engine.schedules(get_forward_backward_func)()
    for step in range(1, count + 1):
        pace.next_step(sleeps=step > EMPTY_STEPS)
        data = [iter(list(_microbatches(case, engine))) for _ in chunks]
        dist.barrier()
        with recorder.in_step(step):
            schedule(
                forward_step_func=_forward_step,
                data_iterator=data if case.chunks > 1 else data[0],
                model=chunks if case.chunks > 1 else chunks[0],
                num_microbatches=case.microbatches,
                seq_length=TOKENS,
                micro_batch_size=case.samples,
            )
        yield step


def _engine(case: Case, *, recorder: TraceRecorder) -> Engine:
    def of_encoder(encoder: PacedEncoder) -> EncoderEngine:
        place = PlaceOfEncoder(
            mode=case.mode_of(encoder),
            entry=encoder.entry,
            encoder_tp=encoder.tp,
            handed_on=(HIDDEN,) * (encoder.stages - 1) if case.apart else (),
            seed=1234,
            micro_batch_sizes=dict.fromkeys((True, False), case.samples),
            timeout_minutes=_MINUTES,
        )
        return EncoderEngine(
            found=place,
            taps=0,
            decoder=case.first_stage,
            costs=paced_costs(case, encoder) if case.streams else None,
        )

    engine = Engine({each.name: of_encoder(each) for each in case.encoders})
    engine.report_to(recorder)
    return engine


def _make_groups(case: Case, engine: Engine) -> None:
    """The decoder's, as at a run's start; the engine makes the encoders' when it is asked."""
    decoder = case.decoder
    initialize = partial(
        parallel_state.initialize_model_parallel,
        decoder.tp,
        decoder.pp,
        case.chunks if case.chunks > 1 else None,
        create_gloo_process_groups=False,
        local_world_size=decoder.world_size,
    )
    if not engine.apart:
        initialize()
        return
    adopt_own_ranks(TEXT_DECODER, decoder, gloo=False, initialize=initialize)
    if engine.own is not None:
        rest_in(engine.own, dp=decoder.dp)


def _chunks(case: Case, engine: Engine, *, pace: Pace) -> list[PacedChunk]:
    """This rank's, one on a rank of an encoder's own."""
    config = TransformerConfig(
        num_layers=len(case.stages) * case.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=case.tp,
        kv_channels=1,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=len(case.stages),
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=len(case.stages),
        pipeline_dtype=torch.float32,
        # As Megatron's flags have it: what is sent overlaps where there are virtual stages.
        overlap_p2p_comm=case.chunks > 1,
        batch_p2p_comm=case.chunks == 1,
        batch_p2p_sync=False,
    )
    if engine.decodes:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        of_rank = case.stages[stage]
        time = StageTime(
            forward=of_rank.forward / case.chunks, backward=of_rank.backward / case.chunks
        )
        places = [number * len(case.stages) + stage for number in range(case.chunks)]
    else:
        time, places = StageTime(forward=0, backward=0), [0]
    last = len(case.stages) * case.chunks - 1
    chunks = [
        PacedChunk(
            case,
            config=config,
            encoders=_encoders_of(case, engine, first=number == 0),
            time=time,
            first=place == 0,
            last=place == last,
            vp_stage=number if case.chunks > 1 else None,
            pace=pace,
        )
        for number, place in enumerate(places)
    ]
    for chunk in chunks:
        if engine.decodes:
            attached: Any = chunk
            engine.attach(attached)
    engine.built(chunks, None)
    return chunks


def _encoders_of(case: Case, engine: Engine, *, first: bool) -> list[PacedEncoder]:
    """Those that lie on this rank, in its ``first`` chunk."""
    if not engine.decodes:
        return [each for each in case.encoders if each.name == engine.own]
    if not first or engine.apart:
        return []
    here = parallel_state.get_pipeline_model_parallel_rank() == 0
    return [each for each in case.encoders if here or case.mode_of(each).on_every_stage]


def _forward_step(data: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
    output: Tensor = chunk(next(data))
    return output, lambda hidden: (hidden.sum(), {})


def _microbatches(case: Case, engine: Engine) -> Iterator[Microbatch]:
    """Of a step, as this rank takes them: all samples, or those of an encoder replica's pieces."""
    pieces = [range(case.samples)]
    shares: dict[str, Sequence[tuple[Share, ...]]] = {
        each.name: _in_turn(case, engine, each) for each in case.encoders
    }
    for name, media in media_of(case).items():
        planner = engine.encoders[name].step_planner
        if planner is not None:
            shares[name] = planner.shares(media) or shares[name]
    if engine.own is not None:
        made = engine.encoders[engine.own].place.made_by(dist.get_rank(), training=True)
        pieces = [each.samples for each in made]
    for number in range(case.microbatches):
        for samples in pieces:
            units = {
                name: _unit(case, len(samples), shares=of_encoder[number])
                for name, of_encoder in shares.items()
            }
            tokens = len(samples) * TOKENS
            yield Microbatch(
                input_ids=None,
                position_ids=torch.zeros(3, len(samples), TOKENS, dtype=torch.int64),
                labels=None,
                loss_mask=None,
                tokens=tokens,
                units=units,
                number=number,
            )


def _in_turn(case: Case, engine: Engine, encoder: PacedEncoder) -> Sequence[tuple[Share, ...]]:
    """Which of the encoder's replicas encodes each microbatch's unit."""
    side = engine.encoders[encoder.name]
    replicas = 1
    if side.mode.around_schedule and not case.apart:
        assert side.place.edge is not None, "it lies where the decoder lies"
        replicas = len(side.place.edge.replicas)
    return in_turn(media_of(case)[encoder.name], replicas)


def _unit(case: Case, samples: int, *, shares: tuple[Share, ...]) -> Unit:
    """All of its media are here, of whatever shares: nothing is computed of them."""
    grids = grids_of(case, samples=samples)

    def rows(numbers: range) -> torch.Tensor:
        return torch.zeros(sum(prod(grids[number]) for number in numbers), 1)

    return Unit(
        places=tuple(np.arange(TOKENS) for _ in range(samples)),
        grids=grids,
        shares=shares,
        media=MediaToCome(grids=torch.tensor(grids), numbers=range(len(grids)), load=rows),
    )


def _place(engine: Engine) -> dict[str, int]:
    """For labels: the decoder's coordinates, or the rank's number among the encoder's own."""
    if engine.own is not None:
        layout = engine.encoders[engine.own].place.layout
        assert layout is not None
        return {engine.own: layout.ranks.index(dist.get_rank())}
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
    }
