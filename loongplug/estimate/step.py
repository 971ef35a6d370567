"""One step of a rank: its encoders' plans as they are executed, its decoder's passes as traced."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.estimate.encoder_stand_in import EncoderStandIn, UnitCosts
from loongplug.estimate.executed import EncoderReplay, one_rank
from loongplug.estimate.microbatches import blank_unit, media_rows, segments_of
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.stage import Held, buffers
from loongplug.estimate.state import State
from loongplug.estimate.tape import DECODER, ENCODER, FEATURES, PIPELINE, STATES, Tape
from loongplug.estimate.trace import StageBefore, Tracer, UnitBytes
from loongplug.hetero.engine import EncoderEngine
from loongplug.hetero.operations import BEGIN, END
from loongplug.hetero.pass_order import Pass, Pipeline, Turn
from loongplug.hetero.recorded_schedule import events, shortened
from loongplug.models.encoder_stages import payload_widths
from loongplug.models.entries import Entry
from loongplug.training.arguments import ParsedArguments
from loongplug.training.decoder_data import assignment_of

ROLES = ("decoder", "encoder + decoder")

# Of an encoder's units that were traced, by its name, its stage and their media.
EncoderCosts = dict[tuple[str, int, tuple[Any, ...]], UnitBytes]

# What is held before a turn of the step and within it, by its number.
_Around = Callable[[int, Turn], tuple[Held, Held]]


class EstimatedStep:
    """A step of a rank: its chunks traced once, then followed for any rank like it.

    ``host`` is the most of the tensors that leave by name.
    """

    def __init__(
        self,
        rank: EstimatedRank,
        parsed: ParsedArguments,
        microbatches: Sequence[Microbatch],
        *,
        states: Mapping[str, State],
        encoder_costs: EncoderCosts,
        trains: Mapping[str, Sequence[bool]],
    ) -> None:
        """``microbatches``: on ranks of an encoder's own, the pieces that they encode.

        ``states`` are those of the entries. ``encoder_costs`` has units that were traced before, on
        a stage with the same encoders. ``trains``: which stages of encoders on ranks of their own
        do.
        """
        self._rank = rank
        self._model: Any = parsed.model
        self._microbatches = microbatches
        self._states = states
        self._heard = trains
        self._first = rank.chunks[0]
        self.host = self._buffers = 0
        length = max(each.split.length for each in microbatches)
        self._args = Namespace(**vars(parsed.args) | {"seq_length": length})
        self._apart = {name for name, each in rank.engine.encoders.items() if each.steps}
        self._largest = {name: self._largest_unit(name) for name in microbatches[0].units}
        inline: Mapping[str, int] = {}
        if rank.engine.own is None:
            self.role = ROLES[self._first.encodes]
            inline = self._trace_decoder().encoders
        else:
            self.role = self._model.keys[rank.engine.own]
        self._costs = {
            entry.name: self._unit_costs(
                entry,
                inline=None if entry.name in self._apart else inline.get(entry.name, 0),
                known=encoder_costs,
            )
            for entry in self._first.encoders
        }

    def _largest_unit(self, encoder: str) -> Unit:
        """The one with most rows; the smallest that there is where there are no media."""
        largest = max((each.units[encoder] for each in self._microbatches), key=lambda x: x.rows)
        return largest if largest.grids else blank_unit(self._model.encoder(encoder))

    def _trace_decoder(self) -> Held:
        """What its passes hold; gives what is there behind the first forward of the first chunk."""
        args, first = self._args, self._first
        self._pipeline = Pipeline(
            stages=args.pipeline_model_parallel_size,
            stage=self._rank.stage,
            chunks=len(self._rank.chunks),
            group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
            overlaps=args.overlap_moe_expert_parallel_comm,
        )
        own = {entry.name: first.trains(entry) for entry in first.encoders}
        tracer = Tracer(
            args,
            self._model,
            self._largest,
            segments=segments_of(max(self._microbatches, key=media_rows)),
            features_train={
                name: own.get(name, any(self._heard.get(name, ()))) for name in self._apart
            },
        )
        depend = self._pipeline.overlaps or args.offload_tensors
        self._around = self._whole(tracer) if depend else self._one_by_one(tracer)
        return self._around(0, Turn(forward=Pass(chunk=0, microbatch=0)))[1]

    def _unit_costs(self, entry: Entry, *, inline: int | None, known: EncoderCosts) -> UnitCosts:
        """What units cost in an encoder; ``inline``: what the largest keeps within a forward."""
        name, encoder = entry.name, self._model.encoder(entry.name)
        stage = 0 if self._rank.engine.own is None else self._rank.stage  # of the encoder
        before = None
        if stage:
            width = payload_widths(encoder)[stage - 1]
            before = StageBefore(width=width, trains=any(self._heard[name][:stage]))

        def traced(unit: Unit) -> UnitBytes:
            key = name, stage, unit.grids
            if key not in known:
                tracer = Tracer(self._args, self._model, {name: unit})
                known[key] = tracer.encoder(self._first, entry, before=before)
            return known[key]

        blank, largest = blank_unit(encoder), self._largest[name]
        row = encoder.row_values * torch.float32.itemsize
        if before is not None:
            row = before.width * self._first.config.params_dtype.itemsize
        return UnitCosts(
            blank=traced(blank),
            blank_rows=blank.rows,
            blank_input=row * (sum(map(encoder.states, blank.grids)) if before else blank.rows),
            largest=UnitBytes(kept=inline) if inline is not None else traced(largest),
            largest_rows=largest.rows,
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
        few, like = shortened(self._pipeline, len(self._microbatches))
        held, self.host = tracer.step(self._rank.chunks, few)

        def traced(number: int) -> Held:
            if number < 0:
                return Held()
            return held[like[number]]

        return lambda number, _: (traced(number - 1), traced(number))

    def follow(self, tape: Tape, *, rank: int) -> None:
        """Have ``tape`` see a step of ``rank``, which has the same chunks as this process's."""
        engines = [
            each
            for name, each in self._rank.engine.encoders.items()
            if name in self._apart and self._rank.engine.own in (None, name)
        ]
        given = [self._given(each, rank) for each in engines]
        stand_ins = {name: self._stand_in(name, tape) for name in self._costs}
        self._first.payload = (  # type: ignore[method-assign]
            lambda entry, unit: stand_ins[entry.name].payload(unit)
        )
        with one_rank(rank, tape):
            replays = [
                self._replay(engine, each, tape)
                for engine, each in zip(engines, given, strict=True)
            ]
            number = 0
            for event in self._events():
                if isinstance(event, Turn):
                    self._work(tape, number, event)
                    number += 1
                    continue
                if event == END:
                    tape.clear(PIPELINE)
                    tape.clear(DECODER)  # reports of losses
                for each in replays:
                    each.at(event)
                if event == BEGIN:
                    tape.add(PIPELINE, self._buffers)
        del self._first.payload

    def _events(self) -> Iterator[Any]:
        if self._rank.engine.own is not None:
            return iter((BEGIN, END))
        return events(self._pipeline, len(self._microbatches))

    def _work(self, tape: Tape, number: int, turn: Turn) -> None:
        """What stays is entered before the work, what goes is there until it is done."""
        tape.doing = turn.name
        before, within = self._around(number, turn)
        changes = {
            ENCODER: self._encoder_of(turn.forward) - self._encoder_of(turn.backward),
            DECODER: within.decoder - before.decoder,
        }
        more = {part: max(0, nbytes) for part, nbytes in changes.items()}
        for part, nbytes in more.items():
            tape.add(part, nbytes)
        tape.sample()
        tape.work(within.most - before.total - sum(more.values()))
        for part, nbytes in changes.items():
            tape.take(part, more[part] - nbytes)

    def _encoder_of(self, each: Pass | None) -> int:
        """What a pass keeps of encoders that encode within the chunk's forward."""
        if each is None or each.chunk or not self._first.pre_process:
            return 0
        units = self._microbatches[each.microbatch].units
        return sum(
            costs.of(units[name].rows).kept
            for name, costs in self._costs.items()
            if name not in self._apart
        )

    def _replay(self, engine: EncoderEngine, given: list[Microbatch], tape: Tape) -> EncoderReplay:
        """Of an encoder that does not work within the decoder's forward."""
        name = engine.found.entry.name
        state = self._states.get(name, State())
        return EncoderReplay(
            engine,
            self._first,
            given,
            trains=self._heard.get(name, ()),
            away=state.by_name(),
            tape=tape,
        )

    def _stand_in(self, name: str, tape: Tape) -> EncoderStandIn:
        encoder, config = self._model.encoder(name), self._first.config
        stage, widths = self._rank.stage, payload_widths(encoder)
        hands_on = self._rank.engine.own is not None and stage < len(widths)
        return EncoderStandIn(
            costs=self._costs[name],
            made=encoder.states if hands_on else encoder.tokens,
            width=widths[stage] if hands_on else (1 + len(encoder.taps())) * config.hidden_size,
            dtype=config.params_dtype,
            region=STATES if hands_on else FEATURES,
            tape=tape,
        )

    def _given(self, engine: EncoderEngine, rank: int) -> list[Microbatch]:
        """The microbatches, with what ``rank`` encodes of them."""
        name, place = engine.found.entry.name, engine.place
        units = [each.units[name] for each in self._microbatches]
        own: Sequence[Sequence[int] | None] = [None] * len(units)  # numbers of media
        if place.edge is not None:
            encoder, replicas = self._model.encoder(name), place.edge.replicas
            assignment = assignment_of(self._args, encoder, replicas=len(replicas))
            if engine.step_planner is not None:
                assignment = replace(assignment, by_plan=engine.step_planner.shares)
            grids = [each.grids for each in units]
            shares = assignment.of(range(len(grids)), grids, step=len(grids))
            replica = place.edge.replica_of(rank)
            units = [replace(unit, shares=each) for unit, each in zip(units, shares, strict=True)]
            own = [_own_media(unit, replica) for unit in units]
        elif engine.here and not self._rank.stage:
            own = [range(len(each.grids)) for each in units]
        row_values = self._model.encoder(name).row_values
        units = [
            unit if media is None else replace(unit, media=_media(unit, media, row_values))
            for unit, media in zip(units, own, strict=True)
        ]
        return [
            replace(each, units={name: unit})
            for each, unit in zip(self._microbatches, units, strict=True)
        ]


def _own_media(unit: Unit, replica: int | None) -> Sequence[int] | None:
    """The numbers of the media in a replica's share; None where it has none."""
    for each in unit.shares:
        if each.encoder_replica == replica:
            return range(len(unit.grids)) if each.media is None else each.media
    return None


def _media(unit: Unit, numbers: Sequence[int], row_values: int) -> MediaInput:
    grids = torch.tensor([unit.grids[each] for each in numbers], dtype=torch.int64).reshape(-1, 3)
    rows = sum(prod(unit.grids[each]) for each in numbers)
    return MediaInput(rows=torch.empty(rows, row_values, device="meta"), grids=grids)
