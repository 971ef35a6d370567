"""Steps of drawn placements, without models: who waits for whom, and which rows come where.

What runs are the product's engines, plans and wires, and Megatron's own schedules, with modules of
a weight each. A token's feature is a number of its own, and so is the gradient that goes back. They
are small whole numbers, of which fp32 makes exact sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from loongplug.hetero import engine
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.engine import EncoderEngine, Engine
from loongplug.hetero.modes import APART
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout

SECONDS = 30.0  # after which a wait is taken for one without end


def play(rank: int, *, draws: Sequence[DrawnPlacement]) -> int:
    """All draws, one behind the other; how many rows this rank's decoder has taken.

    Raises AssertionError, with how to run the draw again.
    """
    groups, taken = Groups(SECONDS), 0
    for draw in draws:
        try:
            steps = _Steps(draw, groups)
            if rank < draw.ranks:
                taken += steps.decode() if steps.engine.decodes else steps.encode()
        except Exception as error:
            again = f"./scripts/fuzz.sh --placement '{draw.to_json()}'"
            raise AssertionError(f"{error!r}\nthese steps again:\n  {again}") from error
        groups.tidy()
    return taken


@dataclass(frozen=True, kw_only=True)
class _Found:
    """An encoder's place, by a draw, over groups that draws share."""

    entry: Entry
    drawn: DrawnEncoder
    decoder: Layout
    rank_offset: int
    micro_batch: int
    groups: Groups
    mode = APART

    @property
    def handed_on(self) -> tuple[int, ...]:
        return (WIDTH,) * (self.drawn.pp - 1)

    def build(self) -> EncoderPlace:
        name, of, rank = self.entry.name, self.groups.of, dist.get_rank()
        sizes = {"tp": self.drawn.tp, "pp": self.drawn.pp, "dp": self.drawn.dp}
        placement = one_apart(self.decoder, entry=self.entry, rank_offset=self.rank_offset, **sizes)
        pieces = placement.pieces(name, micro_batch_size=self.micro_batch)
        layout = placement.entry(name).layout
        last_stage = layout.ranks[-layout.stage_size :]
        ends = sorted({*last_stage, *(rank for each in pieces for rank in each.edge.consumers)})
        groups = {Cargo.FEATURES: of("there", ends), Cargo.GRADIENTS: of("back", ends)}
        if layout.pp > 1:
            groups[Cargo.STATES] = of("states", layout.ranks)
            groups[Cargo.STATE_GRADIENTS] = of("of states", layout.ranks)
        return EncoderPlace(
            state=SimpleNamespace() if rank in layout.ranks else None,  # type: ignore[arg-type]
            replica_group=self._mine("shares", layout.groups("tp")),
            layout=layout,
            pieces=dict.fromkeys((True, False), pieces),
            groups=groups,
            deals=self._mine("deals", self.decoder.groups("tp")),
        )

    def _mine(self, name: str, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        made = [self.groups.of(name, ranks) for ranks in groups]
        return next((each for each in made if each is not None), None)


class _Steps:
    """The steps of one draw on one rank. Collective over all ranks."""

    def __init__(self, draw: DrawnPlacement, groups: Groups) -> None:
        self.draw, self.rank = draw, dist.get_rank()
        self.decoder = Layout(tp=draw.tp, pp=draw.pp, dp=draw.dp)
        # What engines ask of a run's decoder.
        engine.decoder_layout = lambda: self.decoder  # type: ignore[assignment]
        engine.parallel_state = SimpleNamespace(is_pipeline_last_stage=lambda **_: False)
        group = draw.group if draw.vpp > 1 else draw.pp
        first_stage = Pipeline(stages=draw.pp, stage=0, chunks=draw.vpp, group=group)
        stages = self.decoder.groups("pp") if draw.pp > 1 else []
        pipelines = [groups.of("pp", ranks) for ranks in stages]
        self._pipeline = next((each for each in pipelines if each is not None), None)
        offsets = accumulate(
            (each.ranks for each in draw.encoders), initial=self.decoder.world_size
        )
        self.encoders: dict[str, EncoderEngine] = {}
        for number, (each, offset) in enumerate(zip(draw.encoders, offsets, strict=False)):
            found: Any = _Found(
                entry=Entry(name=f"encoder {number}", role=Role.ENCODER, into="text_decoder"),
                drawn=each,
                decoder=self.decoder,
                rank_offset=offset,
                micro_batch=draw.micro_batch,
                groups=groups,
            )
            encoder = EncoderEngine(found=found, taps=0, decoder=first_stage)
            encoder.hear(each.trains)
            self.encoders[found.entry.name] = encoder
        self.engine = Engine(self.encoders)
        self.step = self._taken = 0

    @cached_property
    def config(self) -> Any:
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

    def _chunk(self, **options: bool) -> Any:
        entries = [each.found.entry for each in self.encoders.values()]
        return Chunk(self.config, entries, **options)

    def encode(self) -> int:
        """The steps of one of an encoder's ranks."""
        own: Any = self.encoders[self.engine.own or ""]
        trains, stage = own.found.drawn.trains, own.place.layout.coordinates(self.rank).pp
        chunk = self._chunk(first=stage == 0, trains=trains[stage])
        schedule = self.engine.schedules(_nothing)()
        for step, training in enumerate(self.draw.steps):
            self.step = step
            chunk.came = 0
            data = [
                self._piece(own.found.entry.name, piece, number, given=stage == 0)
                for number in range(self.draw.microbatches)
                for piece in own.place.made_by(self.rank, training=True)
            ]
            schedule(
                forward_step_func=None,  # it decodes nothing
                data_iterator=iter(data),
                model=[chunk],
                num_microbatches=self.draw.microbatches,
                forward_only=not training,
            )
            goes_back = training and any(trains[: stage + 1])
            expected = max(1, len(data)) if goes_back else 0
            assert chunk.came == expected, f"{chunk.came} gradients of {expected} units"
        return 0

    def _piece(self, name: str, piece: ApartPiece, number: int, *, given: bool) -> Microbatch:
        """What an encoder's rank has of a piece: places, and on the first stage rows."""
        replica = piece.decoder
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
            media=media if given else None,
        )
        return _microbatch({name: unit}, number)

    def decode(self) -> int:
        """The steps of one of the decoder's ranks; the rows that it took here."""
        draw, place = self.draw, self.decoder.coordinates(self.rank)
        chunks = [
            self._chunk(first=place.pp == 0 and number == 0, trains=draw.decoder_trains)
            for number in range(draw.vpp)
        ]
        self.engine.attach(chunks[0])
        schedule = self.engine.schedules(self._megatrons)()
        data = [
            _microbatch(
                {
                    name: Unit(places=tuple(places(draw, name, place.dp, number)))
                    for name in self.encoders
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
            found = source(microbatch.number).embeddings
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
