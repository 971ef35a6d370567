"""One step of a rank, followed piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from loongplug.estimate.encoder_side import EncoderSide, UnitCosts
from loongplug.estimate.ledger import DECODER, ENCODER, PIPELINE, Ledger
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.schedule import Pass, Piece, Pipeline, enough, pieces, stands_for
from loongplug.estimate.stage import Held, buffers
from loongplug.estimate.state import State
from loongplug.estimate.trace import Cost, Tracer
from loongplug.estimate.units import UnitSize, encoder_replicas_of
from loongplug.hetero.operations import BEGIN, END, backward, forward, gradient
from loongplug.training.arguments import ParsedArguments

_PIXEL_BYTES = 4  # float32, as they come

# What is held before a piece of the step and within it, by its number.
_Around = Callable[[int, Piece], tuple[Held, Held]]


class Step:
    """A step of one rank: its chunks traced once, then followed for any rank like it.

    ``host`` is the most of the tensors that leave by name.
    """

    def __init__(
        self,
        rank: EstimatedRank,
        parsed: ParsedArguments,
        units: Sequence[UnitSize],
        *,
        encoder_state: State,
        encoder_costs: dict[UnitSize, Cost],
    ) -> None:
        """``encoder_costs`` has units that were traced before, on a stage with the same encoder."""
        self._rank = rank
        self._args = args = parsed.args
        self._model: Any = parsed.model
        self._units = units
        self._encoder_state = encoder_state
        first = rank.chunks[0]
        self.has_encoder = first.encodes
        self._trains = any(first.trains(entry) for entry in first.encoders)
        self._pipeline = Pipeline(
            stages=args.pipeline_model_parallel_size,
            stage=rank.stage,
            chunks=len(rank.chunks),
            group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
            overlaps=args.overlap_moe_expert_parallel_comm,
        )
        side = self._model.vision.spatial_merge_size
        self._merge = side * side
        blank = UnitSize(grids=((1, side, side),))
        largest = max(units, key=lambda each: each.patches)
        if not largest.grids:
            largest = replace(largest, grids=blank.grids)
        apart = rank.engine.steps
        tracer = Tracer(args, self._model, largest, features_train=self._trains if apart else None)
        blank_cost = largest_cost = Cost()
        for unit in (blank, largest) if apart else (blank,):
            if self.has_encoder and unit not in encoder_costs:
                encoder_costs[unit] = Tracer(args, self._model, unit).encoder(first)
        if self.has_encoder:
            blank_cost = encoder_costs[blank]
        if self.has_encoder and apart:
            largest_cost = encoder_costs[largest]
        self.host = self._buffers = 0
        depend = self._pipeline.overlaps or args.offload_tensors
        self._around = self._whole(tracer) if depend else self._one_by_one(tracer)
        # The first piece is a forward of the first chunk alone.
        _, held = self._around(0, Piece(forward=Pass(chunk=0, microbatch=0)))
        self._encodes_inline = held.encoder > 0
        if self._encodes_inline:
            largest_cost = Cost(kept=held.encoder)
        self._costs = UnitCosts(
            blank=blank_cost,
            blank_patches=self._merge,
            largest=largest_cost,
            largest_patches=largest.patches,
        )

    def _one_by_one(self, tracer: Tracer) -> _Around:
        """Passes that have nothing to do with each other, each traced by itself."""
        alone = [tracer.alone(chunk) for chunk in self._rank.chunks]
        self._buffers = buffers(self._rank.chunks, self._args)

        def around(_: int, piece: Piece) -> tuple[Held, Held]:
            if piece.forward is not None:
                return Held(), alone[piece.forward.chunk][0]
            assert piece.backward is not None
            behind_forward, within = alone[piece.backward.chunk]
            return behind_forward, Held(most=within.most)

        return around

    def _whole(self, tracer: Tracer) -> _Around:
        """Passes that depend on each other, traced as a step."""
        few = enough(self._pipeline, len(self._units))
        held, self.host = tracer.step(self._rank.chunks, list(pieces(self._pipeline, few)))

        def traced(number: int) -> Held:
            if number < 0:
                return Held()
            return held[stands_for(self._pipeline, len(self._units), number=number)]

        return lambda number, _: (traced(number - 1), traced(number))

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what a step of ``rank`` makes and frees, with the same chunks as this process's."""
        side = self._side(rank)
        side.at(ledger, BEGIN)
        ledger.add(PIPELINE, self._buffers)
        for number, piece in enumerate(pieces(self._pipeline, len(self._units))):
            if piece.forward is not None and piece.forward.chunk == 0:
                side.at(ledger, forward(piece.forward.microbatch))
            if piece.backward is not None and piece.backward.chunk == 0:
                side.at(ledger, backward(piece.backward.microbatch))
            self._work(ledger, number, piece)
            if piece.backward is not None and piece.backward.chunk == 0:
                side.at(ledger, gradient(piece.backward.microbatch))
        ledger.clear(PIPELINE)
        side.at(ledger, END)

    def _work(self, ledger: Ledger, number: int, piece: Piece) -> None:
        """What stays is entered before the work, what goes is there until it is done."""
        before, within = self._around(number, piece)
        changes = {
            ENCODER: self._encoder_of(piece.forward) - self._encoder_of(piece.backward),
            DECODER: within.decoder - before.decoder,
        }
        more = {part: max(0, nbytes) for part, nbytes in changes.items()}
        for part, nbytes in more.items():
            ledger.add(part, nbytes)
        ledger.work(piece.name, within.most - before.total - sum(more.values()))
        for part, nbytes in changes.items():
            ledger.take(part, more[part] - nbytes)

    def _encoder_of(self, each: Pass | None) -> int:
        """What a pass keeps of the encoder's, where the chunk encodes within its forward."""
        if each is None or each.chunk or not self._encodes_inline:
            return 0
        return self._costs.of(self._units[each.microbatch].patches).kept

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
        pixels = model.vision.row_values * _PIXEL_BYTES
        encoder_replicas = encoder_replicas_of(
            self._units, self._args, model, replicas=len(edge.replicas)
        )
        plan = engine.plan(
            encoder_replicas=encoder_replicas, training=True, trains=self._trains, rank=rank
        )
        return EncoderSide(
            plan=plan,
            away=self._encoder_state.by_name(),
            edge=edge,
            rank=rank,
            units=self._units,
            encoder_replicas=encoder_replicas,
            merge=self._merge,
            costs=self._costs,
            payload=config.feature_width * config.params_dtype.itemsize,
            pixels=pixels,
            blank_pixels=self._merge * pixels if self._keeps_pixels() else 0,
            copies_shards=self._args.sequence_parallel and self._args.micro_batch_size > 1,
        )
