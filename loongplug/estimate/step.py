"""One step of a rank, followed turn by turn."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any

from loongplug.data.positions import Grid
from loongplug.estimate.encoded_units import (
    EncodedUnits,
    UnitCosts,
    blank_unit,
    encoded_units,
    largest_unit,
)
from loongplug.estimate.encoder_bytes import EncoderBytes
from loongplug.estimate.exchange_bytes import ExchangeBytes
from loongplug.estimate.ledger import DECODER, ENCODER, PIPELINE, Ledger
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.stage import Held, buffers
from loongplug.estimate.state import State
from loongplug.estimate.trace import Tracer, UnitBytes
from loongplug.estimate.units import MicrobatchSize, UnitSize
from loongplug.estimate.wire_bytes import WireBytes
from loongplug.hetero.crossings import streamed_crossings
from loongplug.hetero.operations import BEGIN, END
from loongplug.hetero.pass_order import Pass, Pipeline, Turn, enough, events, stands_for, turns
from loongplug.hetero.streamed_pieces import Piece
from loongplug.models.entries import Entry
from loongplug.parallel.states import decoder_layout
from loongplug.training.arguments import ParsedArguments
from loongplug.training.decoder_data import assignment_of

_NO_COSTS = UnitCosts(blank=UnitBytes(), blank_rows=0, largest=UnitBytes(), largest_rows=0)

ROLES = ("decoder", "encoder + decoder")

# Of an encoder's units that were traced.
EncoderCosts = dict[tuple[str, UnitSize], UnitBytes]

# What is held before a turn of the step and within it, by its number.
_Around = Callable[[int, Turn], tuple[Held, Held]]


class TracedStep:
    """A step of a decoder's rank: its chunks traced once, then followed for any rank like it.

    ``host`` is the most of the tensors that leave by name.
    """

    def __init__(
        self,
        rank: EstimatedRank,
        parsed: ParsedArguments,
        microbatches: Sequence[MicrobatchSize],
        *,
        states: Mapping[str, State],
        encoder_costs: EncoderCosts,
        trains_apart: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """``states`` are those of the entries.

        ``encoder_costs`` has units that were traced before, on a stage with the same encoders.
        ``trains_apart`` says of encoders on ranks of their own whether they or what goes with them
        trains.
        """
        self._rank = rank
        length = max(each.row_length for each in microbatches)
        self._args = args = Namespace(**vars(parsed.args) | {"seq_length": length})
        self._model: Any = parsed.model
        self._microbatches = microbatches
        self._states = states
        first = rank.chunks[0]
        self.role = ROLES[first.encodes]
        self._trains = {
            **trains_apart,
            **{entry.name: first.trains(entry) for entry in first.encoders},
        }
        self._pipeline = Pipeline(
            stages=args.pipeline_model_parallel_size,
            stage=rank.stage,
            chunks=len(rank.chunks),
            group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
            overlaps=args.overlap_moe_expert_parallel_comm,
        )
        blank = MicrobatchSize(
            units={name: blank_unit(self._model.encoder(name)) for name in rank.engine.encoders},
            row_length=length,
        )
        largest = self._largest(blank)
        self._apart = {name for name, engine in rank.engine.encoders.items() if engine.steps}
        tracer = Tracer(
            args,
            self._model,
            largest,
            features_train={name: self._trains.get(name, False) for name in self._apart},
        )
        self.host = self._buffers = 0
        depend = self._pipeline.overlaps or args.offload_tensors
        self._around = self._whole(tracer) if depend else self._one_by_one(tracer)
        # The first turn is a forward of the first chunk alone.
        _, held = self._around(0, Turn(forward=Pass(chunk=0, microbatch=0)))
        self._costs = {
            entry.name: self._unit_costs(
                entry, blank, largest, inline=held.encoders.get(entry.name, 0), known=encoder_costs
            )
            for entry in first.encoders
        }

    def _largest(self, blank: MicrobatchSize) -> MicrobatchSize:
        """Of each encoder the largest unit, or ``blank`` media where there are none."""
        units = {
            name: largest_unit([each.units[name] for each in self._microbatches], blank=smallest)
            for name, smallest in blank.units.items()
        }
        fullest = max(self._microbatches, key=lambda each: each.rows)
        return replace(blank, units=units, segments=fullest.segments)

    def _unit_costs(
        self,
        entry: Entry,
        blank: MicrobatchSize,
        largest: MicrobatchSize,
        *,
        inline: int,
        known: EncoderCosts,
    ) -> UnitCosts:
        """What units cost in an encoder; ``inline``: what the largest keeps within a forward."""
        chunk = self._rank.chunks[0]

        def traced(like: MicrobatchSize) -> UnitBytes:
            key = entry.name, like.units[entry.name]
            if key not in known:
                known[key] = Tracer(self._args, self._model, like).encoder(chunk, entry)
            return known[key]

        return UnitCosts(
            blank=traced(blank),
            blank_rows=blank.units[entry.name].rows,
            largest=traced(largest) if entry.name in self._apart else UnitBytes(kept=inline),
            largest_rows=largest.units[entry.name].rows,
        )

    def _one_by_one(self, tracer: Tracer) -> _Around:
        """Passes that have nothing to do with each other, each traced by itself."""
        alone = [tracer.alone(chunk) for chunk in self._rank.chunks]
        self._buffers = buffers(self._rank.chunks, self._args)

        def around(_: int, turn: Turn) -> tuple[Held, Held]:
            if turn.forward is not None:
                return Held(), alone[turn.forward.chunk][0]
            assert turn.backward is not None
            behind_forward, within = alone[turn.backward.chunk]
            return behind_forward, Held(most=within.most)

        return around

    def _whole(self, tracer: Tracer) -> _Around:
        """Passes that depend on each other, traced as a step."""
        few = enough(self._pipeline, len(self._microbatches))
        held, self.host = tracer.step(self._rank.chunks, list(turns(self._pipeline, few)))

        def traced(number: int) -> Held:
            if number < 0:
                return Held()
            return held[stands_for(self._pipeline, len(self._microbatches), number=number)]

        return lambda number, _: (traced(number - 1), traced(number))

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what a step of ``rank`` makes and frees, with the same chunks as this process's."""
        sides = [
            self._encoder_bytes(name, rank)
            for name, engine in self._rank.engine.encoders.items()
            if engine.steps
        ]
        number = 0
        for event in events(self._pipeline, len(self._microbatches)):
            if isinstance(event, Turn):
                self._work(ledger, number, event)
                number += 1
                continue
            if event == END:
                ledger.clear(PIPELINE)
            for side in sides:
                side.at(ledger, event)
            if event == BEGIN:
                ledger.add(PIPELINE, self._buffers)

    def _work(self, ledger: Ledger, number: int, turn: Turn) -> None:
        """What stays is entered before the work, what goes is there until it is done."""
        before, within = self._around(number, turn)
        changes = {
            ENCODER: self._encoder_of(turn.forward) - self._encoder_of(turn.backward),
            DECODER: within.decoder - before.decoder,
        }
        more = {part: max(0, nbytes) for part, nbytes in changes.items()}
        for part, nbytes in more.items():
            ledger.add(part, nbytes)
        ledger.work(turn.name, within.most - before.total - sum(more.values()))
        for part, nbytes in changes.items():
            ledger.take(part, more[part] - nbytes)

    def _encoder_of(self, each: Pass | None) -> int:
        """What a pass keeps of encoders that encode within the chunk's forward."""
        if each is None or each.chunk:
            return 0
        units = self._microbatches[each.microbatch].units
        return sum(
            costs.of(units[name].rows).kept
            for name, costs in self._costs.items()
            if name not in self._apart and self._rank.chunks[0].pre_process
        )

    def _encoder_bytes(self, encoder: str, rank: int) -> EncoderBytes:
        """Of an encoder that does not work within the decoder's forward."""
        engine, encoded = self._rank.engine.encoders[encoder], self._encoded(encoder)
        place, trains = engine.place, self._trains.get(encoder, False)
        plan = partial(engine.plan, training=True, trains=trains, rank=rank)
        wire = partial(WireBytes, rank=rank, trains=trains)
        spec = encoded.spec()
        if place.pieces is not None:  # on ranks of its own
            crossings = engine.crossings(spec, True, rank=rank)
            return EncoderBytes(
                plan=plan(encoder_replicas=spec.encoder_replicas),
                encoded=encoded,
                wires=(wire(crossings.ends, most=engine.in_flight(rank)),),
                crossings=crossings,
            )
        edge, grids = place.edge, [each.grids for each in encoded.units]
        assert edge is not None, "an encoder beside the decoder"
        replica = edge.replica_of(rank)
        planner = engine.step_planner
        planned = None if planner is None else planner.plan(grids)
        if planned is not None:
            stream = planned.stream(replica)
            cp = decoder_layout().cp
            crossings = streamed_crossings(planned.pieces, spec, edge=edge, cp=cp, rank=rank)
            return EncoderBytes(
                plan=plan(encoder_replicas=spec.encoder_replicas, stream=stream),
                encoded=replace(encoded, units=_units_of(planned.pieces, grids)),
                wires=(wire(crossings.ends, most=inf),),
                crossings=crossings,
                streamed=stream.pieces,
            )
        assignment = assignment_of(
            self._args, self._model.encoder(encoder), replicas=len(edge.replicas)
        )
        shares = assignment.of(range(len(grids)), grids, step=len(grids))
        shared = zip(encoded.units, shares, strict=True)
        own = [unit.share(several, replica=replica) for unit, several in shared]
        spec = replace(spec, shares=tuple(shares))
        return EncoderBytes(
            plan=plan(
                encoder_replicas=spec.encoder_replicas, rows=tuple(unit.rows for unit in own)
            ),
            encoded=replace(encoded, units=own),
            exchange=ExchangeBytes(edge=edge, rank=rank, spec=spec),
            away=self._states[encoder].by_name(),
        )

    def _encoded(self, encoder: str) -> EncodedUnits:
        return encoded_units(
            self._rank.chunks[0],
            self._model,
            encoder,
            [each.units[encoder] for each in self._microbatches],
            costs=self._costs.get(encoder, _NO_COSTS),
        )


def _units_of(pieces: Sequence[Piece], grids: Sequence[Sequence[Grid]]) -> list[UnitSize]:
    """What is encoded of each of ``pieces``; ``grids`` by microbatch."""
    return [
        UnitSize(
            grids=tuple(grids[each.microbatch][each.media.start : each.media.stop]),
            row_tokens=(each.tokens,),
        )
        for each in pieces
    ]
