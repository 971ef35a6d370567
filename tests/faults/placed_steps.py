"""Steps of drawn placements, without models: who waits for whom, and which rows come where.

What runs are the product's plans, executors and edges, and Megatron's own schedules, with modules
of a weight each. A token's feature is a number of its own, and so is the gradient that goes back.
They are small whole numbers, of which fp32 makes exact sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from drawn_placements import DrawnEncoder, DrawnPlacement
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from placed_parts import LENGTH, WIDTH, Chunk, Groups, features_of, gradients_of, places
from torch import Tensor

from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.engine import Engine
from loongplug.hetero.executor import Executor
from loongplug.hetero.modes import APART
from loongplug.hetero.operations import Cargo, StepPlan
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.piece_routes import apart_crossings, stage_links
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.policies import apart
from loongplug.hetero.recorded_schedule import Pipeline, forwards_first
from loongplug.hetero.wire import Wire
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout
from loongplug.platform import current_platform

SECONDS = 30.0  # after which a wait is taken for one without end


def play(
    rank: int, *, draws: Sequence[DrawnPlacement], seconds: float = SECONDS, less: int = 0
) -> int:
    """All draws, one behind the other; how many rows this rank's decoder has taken.

    ``less``: so many fewer forwards of encoders before their first backward. Raises
    AssertionError, with how to run the draw again.
    """
    groups, taken = Groups(seconds), 0
    for draw in draws:
        try:
            world = _World(draw, groups, less=less)
            if rank < draw.ranks:
                taken += world.steps()
        except Exception as error:
            again = f"./scripts/fuzz.sh --placement '{draw.to_json()}'"
            raise AssertionError(f"{error!r}\nthese steps again:\n  {again}") from error
        groups.tidy()
    return taken


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an encoder lies, as this rank sees it."""

    entry: Entry
    drawn: DrawnEncoder
    layout: Layout
    pieces: tuple[ApartPiece, ...]

    @property
    def here(self) -> bool:
        return dist.get_rank() in self.layout.ranks

    @property
    def stage(self) -> int:
        """The encoder's that this rank has; the last one where it has none."""
        return self.layout.coordinates(dist.get_rank()).pp if self.here else self.layout.pp - 1

    @property
    def trains(self) -> bool:
        """Whether anything does in this stage or before it."""
        return any(self.drawn.trains[: self.stage + 1])

    @property
    def trains_before(self) -> bool:
        """Whether anything does before it."""
        return any(self.drawn.trains[: self.stage])

    @property
    def made(self) -> tuple[ApartPiece, ...]:
        """The pieces that this rank makes, or has a stage of, of all decoder replicas' samples."""
        return self._place.made_by(dist.get_rank(), training=True)

    @property
    def _place(self) -> EncoderPlace:
        pieces = dict.fromkeys((True, False), self.pieces)
        return EncoderPlace(state=None, replica_group=None, layout=self.layout, pieces=pieces)

    def first(self, decoder: Pipeline) -> int:
        """Forwards before the first backward of a long step."""
        behind = self.layout.pp - 1 - self.stage
        return forwards_first(decoder, (3 + behind) * decoder.group, behind=behind)[0]

    def planned(self, *, decoder: Pipeline, less: int, training: bool, **of_step: Any) -> StepPlan:
        """Of a step; with so many forwards ``less`` ahead than are needed."""
        step = self._place.step(
            dist.get_rank(),
            training=training,
            decoder=decoder,
            trains=training and self.trains,
            last_stage=False,
            **of_step,
        )
        first, count = self.first(decoder) - less, len(step.forwards)
        few = tuple(max(n + 1, min(first + n, count)) for n in range(count))
        return apart(replace(step, forwards=few) if less else step)


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """One encoder on one rank, and what does its part of the steps."""

    place: _Place
    executor: Executor

    @property
    def name(self) -> str:
        return self.place.entry.name

    def alone(self) -> Any:
        return self.executor.instead(dict.fromkeys((True, False), len(self.place.made)))


class _World:
    """One draw on one rank: groups, executors, and its steps. Collective over all ranks."""

    def __init__(self, draw: DrawnPlacement, groups: Groups, *, less: int) -> None:
        self.draw = draw
        self.rank = dist.get_rank()
        self.decoder = Layout(tp=draw.tp, pp=draw.pp, dp=draw.dp)
        group = draw.group if draw.vpp > 1 else draw.pp
        self._first = Pipeline(stages=draw.pp, stage=0, chunks=draw.vpp, group=group)
        self._less = less
        self.config = self._config()
        stages = self.decoder.groups("pp") if draw.pp > 1 else []
        pipelines = [groups.of("pp", ranks) for ranks in stages]
        self._pipeline = next((each for each in pipelines if each is not None), None)
        offsets = accumulate(
            (each.ranks for each in draw.encoders), initial=self.decoder.world_size
        )
        self.encoders = [
            self._encoder(number, each, offset, groups)
            for number, (each, offset) in enumerate(zip(draw.encoders, offsets, strict=False))
        ]
        self.step = self._taken = 0

    def steps(self) -> int:
        """All of them; the rows that the decoder took here."""
        own = next((each for each in self.encoders if each.place.here), None)
        return self._decode() if own is None else self._encode(own)

    def _config(self) -> Any:
        draw = self.draw
        config: Any = ModelParallelConfig(
            tensor_model_parallel_size=draw.tp,
            pipeline_model_parallel_size=draw.pp,
            virtual_pipeline_model_parallel_size=draw.vpp if draw.vpp > 1 else None,
            microbatch_group_size_per_vp_stage=draw.group,
            sequence_parallel=draw.sequence_parallel,
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            # As a run of virtual stages has it: at two stages, batched sends are swapped by gloo.
            batch_p2p_comm=draw.vpp == 1,
            overlap_p2p_comm=draw.vpp > 1,
            batch_p2p_sync=False,
        )
        config.hidden_size, config.calculate_per_token_loss = WIDTH, True
        config.finalize_model_grads_func = None
        return config

    def _encoder(self, number: int, drawn: DrawnEncoder, offset: int, groups: Groups) -> _Encoder:
        entry = Entry(name=f"encoder {number}", role=Role.ENCODER, into="text_decoder")
        draw, sizes = self.draw, {"tp": drawn.tp, "pp": drawn.pp, "dp": drawn.dp}
        placement = one_apart(self.decoder, entry=entry, rank_offset=offset, **sizes)
        place = _Place(
            entry=entry,
            drawn=drawn,
            layout=placement.entry(entry.name).layout,
            pieces=placement.pieces(entry.name, micro_batch_size=draw.micro_batch),
        )
        platform = current_platform()
        most = max(1, place.first(self._first) - self._less)
        executor = Executor(
            planned=lambda *, trains, **step: place.planned(
                decoder=self._first, less=self._less, **step
            ),
            exchange=None,
            entry=entry,
            taps=0,
            outside_schedule=True,
            platform=platform,
            carrier=self._carrier(place, groups, most=most),
        )
        executor.encoder_trains = place.trains
        executor.trains_before = place.trains_before
        return _Encoder(place=place, executor=executor)

    def _carrier(self, place: _Place, groups: Groups, *, most: int) -> Carrier:
        """Between the encoder's last stage and the decoder's first one, and between its stages."""
        layout, edges = place.layout, [each.edge for each in place.pieces]
        last_stage = layout.ranks[-layout.stage_size :]
        ranks = sorted({*last_stage, *(rank for each in edges for rank in each.consumers)})
        there = {
            Cargo.FEATURES: groups.of("there", ranks),
            Cargo.GRADIENTS: groups.of("back", ranks),
        }
        if layout.pp > 1:
            there[Cargo.STATES] = groups.of("states", layout.ranks)
            there[Cargo.STATE_GRADIENTS] = groups.of("of states", layout.ranks)
        deals = [groups.of("deals", each) for each in self.decoder.groups("tp")]
        shares = [groups.of("shares", each) for each in layout.groups("tp")[-layout.dp :]]
        return Carrier(
            wire=Wire(there, most=most, device=current_platform().device),
            deals=_dealer(deals),
            shares=_dealer(shares),
            crossings=lambda units, *_: apart_crossings(place.pieces, units, cp=1, rank=self.rank),
            links=stage_links(layout, self.rank, widths=[WIDTH] * (layout.pp - 1)),
        )

    def _chunk(self, **options: bool) -> Any:
        return Chunk(self.config, [each.place.entry for each in self.encoders], **options)

    def _engine(self) -> Engine:
        found: Any = {each.name: _Engine(each) for each in self.encoders}
        return Engine(found)

    def _encode(self, own: _Encoder) -> int:
        """The steps of one of an encoder's ranks."""
        place = own.place
        chunk: Any = self._chunk(first=place.stage == 0, trains=place.drawn.trains[place.stage])
        schedule = self._engine().schedules(_nothing)()
        for step, training in enumerate(self.draw.steps):
            self.step = step
            chunk.came = 0
            data = [
                self._piece(place, piece, number)
                for number in range(self.draw.microbatches)
                for piece in place.made
            ]
            schedule(
                forward_step_func=None,  # it decodes nothing
                data_iterator=iter(data),
                model=[chunk],
                num_microbatches=self.draw.microbatches,
                forward_only=not training,
            )
            expected = max(1, len(data)) if training and place.trains else 0
            assert chunk.came == expected, f"{chunk.came} gradients of {expected} units"
        return 0

    def _piece(self, place: _Place, piece: ApartPiece, number: int) -> Microbatch:
        """What an encoder's rank has of a piece: places, and on the first stage rows."""
        replica, name = piece.decoder, place.entry.name
        lie = places(self.draw, name, replica, number)
        rows = torch.cat(
            [
                features_of(name, self.step, replica, number, sample, len(lie[sample]))
                for sample in piece.samples
            ]
        )
        grid = (1, 1, len(rows))
        media = MediaInput(
            loaded=rows.unsqueeze(1).expand(-1, WIDTH).contiguous(), grids=torch.tensor([grid])
        )
        unit = Unit(
            places=tuple(lie[sample] for sample in piece.samples),
            grids=(grid,),
            media=None if place.stage else media,
        )
        return _microbatch({name: unit}, number)

    def _decode(self) -> int:
        """The steps of one of the decoder's ranks."""
        draw, place = self.draw, self.decoder.coordinates(self.rank)
        chunks: list[Any] = [
            self._chunk(first=place.pp == 0 and number == 0, trains=draw.decoder_trains)
            for number in range(draw.vpp)
        ]
        engine = self._engine()
        engine.attach(chunks[0])
        schedule = engine.schedules(self._megatrons)()
        data = [
            _microbatch(
                {
                    each.name: Unit(places=tuple(places(draw, each.name, place.dp, number)))
                    for each in self.encoders
                },
                number,
            )
            for number in range(draw.microbatches)
        ]
        for step, training in enumerate(draw.steps):
            self.step = step
            streams: list[Iterator[Microbatch]] = [iter(data), *(iter(()) for _ in chunks[1:])]
            schedule(
                forward_step_func=self._forward,
                data_iterator=streams if draw.vpp > 1 else streams[0],
                model=chunks,
                num_microbatches=draw.microbatches,
                seq_length=draw.tp,
                micro_batch_size=1,
                forward_only=not training,
                **self._groups_of_schedule(),
            )
        return self._taken

    def _megatrons(self) -> Any:
        if self.draw.pp == 1:
            return forward_backward_no_pipelining
        if self.draw.vpp == 1:
            return forward_backward_pipelining_without_interleaving
        return forward_backward_pipelining_with_interleaving

    def _groups_of_schedule(self) -> dict[str, Any]:
        groups: Any = ProcessGroupCollection()
        groups.tp = SimpleNamespace(size=lambda: self.draw.tp)
        groups.cp = SimpleNamespace(size=lambda: 1)
        if self.draw.pp == 1:
            return {"pg_collection": groups}
        pipeline: Any = self._pipeline
        communicator = P2PCommunicator(pp_group=pipeline, config=self.config)
        return {"pg_collection": groups, "p2p_communicator": communicator}

    def _forward(self, data: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Any]:
        """A chunk's forward: the first takes features, of which the last makes a sum."""
        if not chunk.first:
            return chunk.behind(), _loss
        return self._taken_in(next(data), chunk) * chunk.weight, _loss

    def _taken_in(self, microbatch: Microbatch, chunk: Any) -> Tensor:
        """All features of a microbatch, each times the gradient that goes back, as a state."""
        whole = torch.zeros(WIDTH)
        for name, source in chunk.feature_sources.items():
            found = source.features(microbatch.number).embeddings
            expected = self._expected(name, microbatch)
            assert torch.equal(found.detach(), expected), "features are another unit's"
            self._taken += len(found)
            whole = whole + (found * gradients_of(expected)).sum(dim=0)
        rows = 1 if self.draw.sequence_parallel else self.draw.tp
        return torch.cat([whole.view(1, 1, WIDTH), torch.zeros(rows - 1, 1, WIDTH)])

    def _expected(self, name: str, microbatch: Microbatch) -> Tensor:
        """The features that this rank needs, [rows, WIDTH]."""
        place, number = self.decoder.coordinates(self.rank), microbatch.number
        part = LENGTH // self.draw.tp if self.draw.sequence_parallel else LENGTH
        first = place.tp * part if self.draw.sequence_parallel else 0
        rows = [
            features_of(name, self.step, place.dp, number, sample, len(lie))[
                (first <= lie) & (lie < first + part)
            ]
            for sample, lie in enumerate(microbatch.units[name].places)
        ]
        return torch.cat(rows).unsqueeze(1).expand(-1, WIDTH)


class _Engine:
    """What an engine asks of an encoder's."""

    mode = APART

    def __init__(self, encoder: _Encoder) -> None:
        self.here = encoder.place.here
        self.alone = encoder.alone
        self._executor = encoder.executor

    def executor(self) -> Executor:
        return self._executor


def _dealer(groups: Sequence[dist.ProcessGroup | None]) -> Dealer | None:
    """Of the one group that this rank is of."""
    return next((Dealer(each) for each in groups if each is not None), None)


def _microbatch(units: dict[str, Unit], number: int) -> Microbatch:
    return Microbatch(
        input_ids=None,
        position_ids=torch.zeros(3, 1, LENGTH, dtype=torch.int64),
        labels=None,
        loss_mask=None,
        tokens=LENGTH,
        units=units,
        number=number,
    )


def _loss(state: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return state.sum(), torch.tensor(1, dtype=torch.int), {}


def _nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("an encoder's rank runs no schedule of Megatron's")
