"""A run's memory, stage by stage, from its checked arguments."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.estimate.encoder_side import EncoderSide, Encoding, between
from loongplug.estimate.ledger import Ledger
from loongplug.estimate.ranks import Rank, as_rank
from loongplug.estimate.schedule import Pass, Piece, Pipeline, enough, pieces, stands_for
from loongplug.estimate.state import State, Stepping, rank_state
from loongplug.estimate.step import Change, ChangeOf, follow, one_by_one, pipeline_buffers
from loongplug.estimate.trace import Cost, Shapes, Tracer
from loongplug.estimate.units import UnitSize, encoder_replicas_of
from loongplug.estimate.whole_step import Held, StepTracer
from loongplug.models.entries import only_encoder
from loongplug.models.vision_encoder import patch_values
from loongplug.training.arguments import ParsedArguments

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradient buffers", "optimizer state"
_PIXEL_BYTES = 4  # float32, as they come


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The fullest rank of a pipeline stage, in bytes.

    ``parts`` is what there is at its fullest moment of a step, ``when``, by what it is; ``most``
    has of each of these the most at any moment. ``step`` is all that there is in the optimizer's
    step. ``host`` is the most of the tensors that leave by name, which are none of these.
    """

    stage: int
    rank: int
    role: str
    parts: dict[str, int]
    when: str
    most: dict[str, int]
    step: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def estimate(
    parsed: ParsedArguments,
    units: Sequence[UnitSize],
    *,
    stepping: Stepping,
    on_stage: Callable[[int, int], None] = lambda stage, stages: None,
) -> list[RankMemory]:
    """The fullest rank of each pipeline stage of the first model replica.

    ``units`` are the microbatches of a replica's step; ``stepping`` is how the run's optimizer
    works, which the machine decides; ``on_stage`` is told which of how many stages comes next. No
    collectives; there must be no process group. Makes no tensor with memory that grows with the
    model.
    """
    stages = parsed.args.pipeline_model_parallel_size
    found = []
    for stage in range(stages):
        on_stage(stage, stages)
        with as_rank(parsed, stage * parsed.args.world_size // stages) as rank:
            found.append(_fullest(rank, parsed, units, stepping=stepping))
    return found


def _fullest(
    rank: Rank, parsed: ParsedArguments, units: Sequence[UnitSize], *, stepping: Stepping
) -> RankMemory:
    """Of the ranks of a tensor parallel group: they differ in the units that they encode."""
    args = parsed.args
    states = rank_state(rank.chunks, args, stepping=stepping)
    state = sum(states.values(), State())
    encoder = only_encoder(parsed.model.entries())
    step = _Step(rank, parsed, units, encoder_state=states[encoder.name])
    found = []
    for member in dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()):
        ledger = Ledger()
        for name, nbytes in _by_name(state).items():
            ledger.add(name, nbytes)
        step.follow(ledger, rank=member)
        ledger.work("optimizer step", state.step)
        found.append(
            RankMemory(
                stage=rank.stage,
                rank=member,
                role="encoder + decoder" if step.has_encoder else "decoder",
                parts={name: nbytes for name, nbytes in ledger.peak.items() if nbytes},
                when=ledger.when,
                most={name: nbytes for name, nbytes in ledger.most.items() if nbytes},
                step=ledger.live.total() + state.step,
                host=step.host,
            )
        )
    return max(found, key=lambda each: each.total)


def _by_name(state: State) -> dict[str, int]:
    return {WEIGHTS: state.weights, GRADIENTS: state.gradients, OPTIMIZER: state.optimizer}


class _Step:
    """A step of one rank: its chunks traced once, then followed for any rank like it."""

    def __init__(
        self,
        rank: Rank,
        parsed: ParsedArguments,
        units: Sequence[UnitSize],
        *,
        encoder_state: State,
    ) -> None:
        self._rank = rank
        self._args: Namespace = parsed.args
        self._model: Any = parsed.model
        self._units = units
        self._merge = parsed.model.vision.spatial_merge_size**2
        first = rank.chunks[0]
        self.has_encoder = first.encodes
        self._trains = any(first.trains(entry) for entry in first.encoders)
        self._encoder_state = _by_name(encoder_state)
        self._apart = rank.engine.steps
        self._shapes = self._largest()
        self._encoder = self._blank = Cost()
        if self.has_encoder:
            side = self._model.vision.spatial_merge_size
            blank = replace(self._shapes, grids=((1, side, side),))
            self._blank = Tracer(self._args, blank, merge=self._merge).encoder(first)
        if self.has_encoder and self._apart:
            tracer = Tracer(self._args, self._shapes, merge=self._merge)
            self._encoder = tracer.encoder(first)
        self._pipeline = Pipeline(
            stages=self._args.pipeline_model_parallel_size,
            stage=rank.stage,
            chunks=len(rank.chunks),
            group=self._args.microbatch_group_size_per_vp_stage
            or self._args.pipeline_model_parallel_size,
            overlaps=self._args.overlap_moe_expert_parallel_comm,
        )
        self.host = self._buffers = 0
        depend = self._pipeline.overlaps or self._args.offload_tensors
        self._change_of = self._whole() if depend else self._one_by_one()

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """A step of ``rank``, which has the same chunks as this process's."""
        follow(
            ledger,
            self._pipeline,
            self._side(rank),
            microbatches=len(self._units),
            change_of=self._change_of,
            buffers=self._buffers,
        )

    def _one_by_one(self) -> ChangeOf:
        """Passes that are traced each by itself."""
        tracer = Tracer(self._args, self._shapes, merge=self._merge)
        costs = [
            tracer.inline(chunk)
            if not self._apart and chunk.encodes
            else tracer.decoder(chunk, features_train=self._trains)
            for chunk in self._rank.chunks
        ]
        self._buffers = pipeline_buffers(costs)

        def cost_of(chunk: int, microbatch: int) -> Cost:
            cost = costs[chunk]
            return replace(cost, encoder=self._encoder_of(microbatch, cost))

        return one_by_one(cost_of)

    def _whole(self) -> ChangeOf:
        """Passes that depend on each other, traced as a step."""
        few = enough(self._pipeline, len(self._units))
        held = StepTracer(self._args, self._shapes, merge=self._merge).step(
            self._rank.chunks,
            list(pieces(self._pipeline, few)),
            features_train=self._trains if self._apart else None,
        )
        self.host = held.host
        # The first piece is a forward of the first chunk alone.
        inline = Cost(encoder=held.pieces[0].encoder)

        def encoder_of(each: Pass | None) -> int:
            return 0 if each is None or each.chunk else self._encoder_of(each.microbatch, inline)

        def traced(number: int) -> Held:
            if number < 0:
                return Held()
            number = stands_for(self._pipeline, len(self._units), number=number)
            return held.pieces[number]

        def change_of(number: int, piece: Piece) -> Change:
            before, there = traced(number - 1), traced(number)
            return Change(
                encoder=encoder_of(piece.forward) - encoder_of(piece.backward),
                decoder=there.decoder - before.decoder,
                most=there.most - before.total,
            )

        return change_of

    def _largest(self) -> Shapes:
        unit = max(self._units, key=lambda each: each.patches)
        side = self._model.vision.spatial_merge_size
        return Shapes(
            rows=self._args.micro_batch_size,
            length=self._args.seq_length,
            grids=unit.grids or ((1, side, side),),  # the blank image
            segments=unit.segments,
        )

    def _encoder_of(self, microbatch: int, largest: Cost) -> int:
        """What a chunk that encodes keeps of the encoder's, of the largest unit or another."""
        if not largest.encoder:
            return 0
        return between(
            self._blank,
            largest,
            self._units[microbatch].patches,
            smallest=self._merge,
            largest=self._shapes.patches,
        ).encoder

    def _keeps_pixels(self) -> bool:
        """Whether a backward takes them as they come: of the first linear, where that trains."""
        first = self._rank.chunks[0]
        return any(
            parameter.requires_grad and parameter.dtype == torch.float32
            for entry in first.encoders
            for name, parameter in first.modules_of(entry)[entry.name].named_parameters()
            if name.startswith("patch_embed")
        )

    def _side(self, rank: int) -> EncoderSide:
        model, engine = self._model, self._rank.engine
        edge = engine.place.edge
        config = self._rank.chunks[0].text_decoder.config
        pixels = patch_values(model.vision) * _PIXEL_BYTES
        encoder_replicas = encoder_replicas_of(
            self._units, self._args, model, replicas=len(edge.replicas)
        )
        encoding = Encoding(
            edge=edge,
            rank=rank,
            replica=edge.replica_of(rank),
            units=self._units,
            encoder_replicas=encoder_replicas,
            merge=self._merge,
            cost=self._encoder,
            blank=self._blank,
            traced=self._shapes.patches,
            payload=config.feature_width * config.params_dtype.itemsize,
            pixels=pixels,
            blank_pixels=self._merge * pixels if self._keeps_pixels() else 0,
            copies_shards=self._args.sequence_parallel and self._args.micro_batch_size > 1,
        )
        plan = engine.plan(
            encoder_replicas=encoder_replicas, training=True, trains=self._trains, rank=rank
        )
        return EncoderSide(plan, encoding, away=self._encoder_state)
