"""One step of a rank: its encoders' plans as they are executed, its decoder's passes as traced."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.data.positions import Grid
from loongplug.estimate.encoder_stand_in import EncoderStandIn
from loongplug.estimate.executed import EncoderReplay, InlineReplay, one_rank
from loongplug.estimate.microbatches import media_rows
from loongplug.estimate.ranks import EstimatedRank
from loongplug.estimate.stage import TracedStage, TurnBytes
from loongplug.estimate.state import State
from loongplug.estimate.tape import DECODER, FEATURES, PIPELINE, STATES, Tape
from loongplug.estimate.trace import PassBytes, media_of, trace_encoder
from loongplug.hetero.engine import EncoderEngine
from loongplug.hetero.operations import BEGIN, END, Event
from loongplug.hetero.pass_order import Pipeline, Turn
from loongplug.hetero.recorded_schedule import events, shortened
from loongplug.models.encoder_stages import payload_widths
from loongplug.models.entries import Entry
from loongplug.training.arguments import ParsedArguments
from loongplug.training.decoder_data import assignment_of

ROLES = ("decoder", "encoder + decoder")

# Of an encoder's units that were traced, by its name, its stage and their media.
EncoderBytes = dict[tuple[str, int, tuple[Grid, ...]], PassBytes]


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
        traced: EncoderBytes,
        trains: Mapping[str, Sequence[bool]],
    ) -> None:
        """``microbatches``: on ranks of an encoder's own, the pieces that they encode.

        ``states`` are those of the entries. ``traced`` has units that were traced before, on a
        stage with the same encoders. ``trains``: which stages of encoders on ranks of their own do.
        """
        self._rank = rank
        self._args = parsed.args
        self._model: Any = parsed.model
        self._microbatches = microbatches
        self._states = states
        self._trains = trains
        self._first = rank.chunks[0]
        self.host = self._buffers = 0
        self._passes: list[PassBytes] = []  # of each chunk, where they do not depend on each other
        self._turns: list[TurnBytes] = []  # of a step, where they do
        self._largest = {
            name: max((each.units[name] for each in microbatches), key=lambda unit: unit.rows)
            for name in microbatches[0].units
        }
        if rank.engine.own is None:
            self.role = ROLES[self._first.encodes]
            self._trace_decoder()
        else:
            self.role = self._model.keys[rank.engine.own]
        self._stand_ins = {
            entry.name: self._stand_in(entry, traced) for entry in self._first.encoders
        }

    def _trace_decoder(self) -> None:
        """All microbatches have as long rows, and as many media, as the largest."""
        args, first, count = self._args, self._first, len(self._microbatches)
        pipeline = self._pipeline = Pipeline(
            stages=args.pipeline_model_parallel_size,
            stage=self._rank.stage,
            chunks=len(self._rank.chunks),
            group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
            overlaps=args.overlap_moe_expert_parallel_comm,
        )
        own = {entry.name: first.trains(entry) for entry in first.encoders}
        largest = max(self._microbatches, key=lambda each: (each.split.length, media_rows(each)))
        stage = TracedStage(
            args,
            self._model,
            self._rank.chunks,
            like=replace(largest, units=self._largest),
            features_train={
                name: own.get(name, any(self._trains.get(name, ()))) for name in self._largest
            },
        )
        if pipeline.overlaps or args.offload_tensors:
            few, like = shortened(pipeline, count)
            found, self.host = stage.step(few)
            self._turns = [found[number] for number in like]
        else:
            self._passes = [stage.alone(chunk) for chunk in self._rank.chunks]
            self._buffers = stage.buffers

    def _stand_in(self, entry: Entry, known: EncoderBytes) -> EncoderStandIn:
        name, encoder, config = entry.name, self._model.encoder(entry.name), self._first.config
        stage = 0 if self._rank.engine.own is None else self._rank.stage  # of the encoder

        def traced(grids: tuple[Grid, ...]) -> PassBytes:
            if (name, stage, grids) not in known:
                known[name, stage, grids] = trace_encoder(
                    self._args,
                    self._first,
                    entry,
                    encoder,
                    grids,
                    stage=stage,
                    trains_before=any(self._trains.get(name, ())[:stage]),
                )
            return known[name, stage, grids]

        blank, widths = (encoder.blank_grid(),), payload_widths(encoder)
        hands_on = stage < len(widths)
        return EncoderStandIn(
            blank=traced(blank),
            largest=traced(self._largest[name].grids or blank),
            made=encoder.states if hands_on else encoder.tokens,
            width=widths[stage] if hands_on else (1 + len(encoder.taps())) * config.hidden_size,
            dtype=config.params_dtype,
            region=STATES if hands_on else FEATURES,
        )

    def follow(self, tape: Tape, *, rank: int) -> None:
        """Have ``tape`` see a step of ``rank``, which has the same chunks as this process's."""
        engines = self._rank.engine.encoders
        around = [
            (each, self._given(name, rank))
            for name, each in engines.items()
            if each.steps and self._rank.engine.own in (None, name)
        ]
        inline = [
            (entry, self._given(entry.name, rank))
            for entry in self._first.encoders
            if not engines[entry.name].steps
        ]
        self._first.payload = (  # type: ignore[method-assign]
            lambda entry, unit: self._stand_ins[entry.name].payload(unit, tape)
        )
        with one_rank(rank, tape):
            replays: list[EncoderReplay | InlineReplay] = [
                *(self._replay(engine, given, tape) for engine, given in around),
                *(InlineReplay(entry, self._first, given, tape=tape) for entry, given in inline),
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
                if event.event is Event.PASS:
                    tape.sample()
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
        change, most = self._bytes_of(number, turn)
        more = max(0, change)
        tape.add(DECODER, more)
        tape.work(most - more)
        tape.take(DECODER, more - change)

    def _bytes_of(self, number: int, turn: Turn) -> tuple[int, int]:
        """How much more there is behind a turn than before, and the most within it besides."""
        if turn.forward is not None and self._passes:
            forward = self._passes[turn.forward.chunk]
            return forward.kept, forward.forward
        if turn.backward is not None and self._passes:
            backward = self._passes[turn.backward.chunk]
            return -backward.kept, backward.backward
        before, within = (
            self._turns[each] if each >= 0 else TurnBytes(held=0, most=0)
            for each in (number - 1, number)
        )
        return within.held - before.held, within.most - before.held

    def _replay(self, engine: EncoderEngine, given: list[Microbatch], tape: Tape) -> EncoderReplay:
        """Of an encoder that does not work within the decoder's forward."""
        name = engine.found.entry.name
        return EncoderReplay(
            engine,
            self._first,
            given,
            trains=self._trains.get(name, ()),
            away=self._states.get(name, State()).by_name(),
            tape=tape,
        )

    def _given(self, name: str, rank: int) -> list[Microbatch]:
        """The microbatches, with what ``rank`` encodes of them."""
        engine, encoder = self._rank.engine.encoders[name], self._model.encoder(name)
        place, units = engine.place, [each.units[name] for each in self._microbatches]
        replica: int | None = None
        if engine.steps and place.edge is not None:
            replicas = place.edge.replicas
            assignment = assignment_of(self._args, encoder, replicas=len(replicas))
            if engine.step_planner is not None:
                assignment = replace(assignment, by_plan=engine.step_planner.shares)
            shares = assignment.of_step([each.grids for each in units])
            units = [replace(unit, shares=each) for unit, each in zip(units, shares, strict=True)]
            replica = place.edge.replica_of(rank)
        elif not engine.apart or (engine.here and not self._rank.stage):
            replica = 0  # which all of a unit is the share of
        return [
            replace(each, units={name: _loaded(unit, replica, encoder.row_values)})
            for each, unit in zip(self._microbatches, units, strict=True)
        ]


def _loaded(unit: Unit, replica: int | None, row_values: int) -> Unit:
    """With the media of a replica's share, where it has one."""
    for share in unit.shares:
        if share.encoder_replica == replica:
            numbers = range(len(unit.grids)) if share.media is None else share.media
            media = media_of([unit.grids[each] for each in numbers], row_values=row_values)
            return replace(unit, media=media)
    return unit
