"""A run's memory, stage by stage, from its checked arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.estimate.encoder_replay import EncoderReplay, one_rank
from loongplug.estimate.live_bytes import (
    DECODER,
    ENCODER,
    FEATURES,
    PIPELINE,
    STATES,
    TRANSIENT,
    Tape,
)
from loongplug.estimate.ranks import EstimatedRank, State, as_rank, rank_state
from loongplug.estimate.run_of_flags import StepOf, media_rows, own_ranks_of
from loongplug.estimate.traced_stage import TracedStage, TurnBytes
from loongplug.estimate.tracing import EncoderStandIn, PassBytes, media_of, trace_encoder
from loongplug.hetero.operations import BEGIN, END, Event, When
from loongplug.hetero.recorded_schedule import Pipeline, Turn, events, first_stage, shortened, turns
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.encoder import payload_widths
from loongplug.models.entries import Entry
from loongplug.training.arguments import ParsedArguments
from loongplug.training.rank_data import assignment_of
from loongplug.training.rules.streaming import communicators_of

ROLES = ("decoder", "encoder + decoder")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The fullest rank of a pipeline stage, in bytes.

    ``role`` says whose stage it is: the decoder's, with encoders or without, or that of the encoder
    on ranks of its own that the YAML calls so. ``parts`` is what there is at its fullest moment of
    a step, ``when``, by what it is; ``most`` has of each of these the most at any moment. ``step``
    is all that there is in the optimizer's step. ``host`` is the most of the tensors that leave by
    name, which are none of these; nor are the ``communicators`` of NCCL, 0 where the run has none.
    """

    stage: int
    rank: int
    role: str
    parts: dict[str, int]
    when: str
    most: dict[str, int]
    step: int
    host: int = 0
    communicators: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def place(self) -> str:
        return f"stage {self.stage}" + ("" if self.role in ROLES else f" of {self.role}")


def estimate(parsed: ParsedArguments, step_of: StepOf) -> list[RankMemory]:
    """The fullest rank of each pipeline stage: of the decoder's first replica, then of encoders.

    ``step_of`` gives the microbatches of a step; an encoder on ranks of its own is seen at its
    busiest replica. No collectives; there must be no process group. Makes no tensor with memory
    that grows with the model.
    """
    args, model = parsed.args, parsed.model
    own, stages = own_ranks_of(args, model), args.pipeline_model_parallel_size
    # Encoders first, stage by stage: those behind hear whether they train.
    steps: list[tuple[int, Sequence[Microbatch]]] = []
    for each in own:
        pieces = step_of(each.parts(packed=args.packing))
        steps += [(each.rank(stage), pieces) for stage in range(each.layout.pp)]
    count, microbatches = len(steps), step_of({0: None})
    steps += [(stage * args.world_size // stages, microbatches) for stage in range(stages)]
    trains = {each.name: [False] * each.layout.pp for each in own}
    traced: dict[Any, PassBytes] = {}  # all stages that encode have the same encoders
    counted = {} if args.target_device == "cpu" else communicators_of(args, model)
    found = []
    for first, microbatches in steps:
        with as_rank(parsed, first) as rank:
            if rank.engine.own is not None:
                (entry,) = rank.chunks[0].encoders
                trains[entry.name][rank.stage] = rank.chunks[0].trains(entry)
            step = EstimatedStep(
                rank=rank,
                parsed=parsed,
                microbatches=microbatches,
                states=rank_state(rank.chunks, args),
                traced=traced,
                trains=trains,
            )
            # They differ in the units that they encode.
            alike = parallel_state.get_tensor_model_parallel_group
            if not rank.engine.apart:  # else groups of one context part deal, which is the first
                alike = parallel_state.get_tensor_and_context_parallel_group
            members = dist.get_process_group_ranks(alike())
            fullest = max(map(step.memory, members), key=lambda each: each.total)
        communicators = counted[fullest.rank].total if counted else 0
        found.append(replace(fullest, communicators=communicators))
    return [*found[count:], *found[:count]]


@dataclass(kw_only=True, eq=False)
class EstimatedStep:
    """A step of a rank: its chunks traced once, then followed for any rank like it.

    Its encoders' plans are executed, its decoder's passes are as they were traced. On ranks of an
    encoder's own, ``microbatches`` are the pieces that they encode. ``states`` are those of the
    entries. ``traced`` has units that were traced before, by the encoder's name, its stage and
    their grids. ``trains``: which stages of encoders on ranks of their own do.
    """

    rank: EstimatedRank
    parsed: ParsedArguments
    microbatches: Sequence[Microbatch]
    states: Mapping[str, State]
    traced: dict[Any, PassBytes]
    trains: Mapping[str, Sequence[bool]]

    def __post_init__(self) -> None:
        self._args, self._model = self.parsed.args, self.parsed.model
        self._first = self.rank.chunks[0]
        self._pipeline: Pipeline | None = None  # the decoder's
        self._host = self._buffers = 0
        self._turns: list[TurnBytes] = []  # the decoder's
        self._largest = {
            name: max((each.units[name] for each in self.microbatches), key=lambda unit: unit.rows)
            for name in self.microbatches[0].units
        }
        if self.rank.engine.own is None:
            self._trace_decoder()
        self._stand_ins = {entry.name: self._stand_in(entry) for entry in self._first.encoders}

    def _trace_decoder(self) -> None:
        """Trace passes, where all microbatches have rows and media as the largest has."""
        args, first, count = self._args, self._first, len(self.microbatches)
        pipeline = self._pipeline = replace(first_stage(args), stage=self.rank.stage)
        largest = max(self.microbatches, key=lambda each: (each.split.length, media_rows(each)))
        stage = TracedStage(
            args,
            self._model,
            self.rank.chunks,
            like=replace(largest, units=self._largest),
            features_train=[
                entry.name
                for entry in first.entries
                if first.trains(entry) or any(self.trains.get(entry.name, ()))
            ],
        )
        if pipeline.overlaps or args.offload_tensors:  # passes depend on each other
            self._turns, self._host = stage.step(*shortened(pipeline, count))
            return
        self._buffers = stage.buffers
        passes = [stage.alone(chunk) for chunk in self.rank.chunks]
        for turn in turns(pipeline, count):
            if turn.forward is not None:
                self._turns.append(passes[turn.forward.chunk][0])
            if turn.backward is not None:
                self._turns.append(passes[turn.backward.chunk][1])

    def _stand_in(self, entry: Entry) -> EncoderStandIn:
        known, name, config = self.traced, entry.name, self._first.config
        encoder = self._model.encoder(name)
        stage = 0 if self.rank.engine.own is None else self.rank.stage  # of the encoder
        blank = (encoder.blank_grid(),)
        largest = self._largest[name].grids or blank
        for grids in (blank, largest):
            if (name, stage, grids) not in known:
                known[name, stage, grids] = trace_encoder(
                    self._args,
                    self._first,
                    entry,
                    encoder,
                    grids,
                    stage=stage,
                    trains_before=any(self.trains.get(name, ())[:stage]),
                )
        widths = payload_widths(encoder)
        hands_on = stage < len(widths)
        return EncoderStandIn(
            blank=known[name, stage, blank],
            largest=known[name, stage, largest],
            made=encoder.states if hands_on else encoder.tokens,
            width=widths[stage] if hands_on else (1 + len(encoder.taps())) * config.hidden_size,
            dtype=config.params_dtype,
            region=STATES if hands_on else FEATURES,
        )

    def memory(self, rank: int) -> RankMemory:
        """The memory of a rank that has the same chunks as this process's."""
        state, own = sum(self.states.values(), State()), self.rank.engine.own
        kept, tape = state.by_name(), Tape(region=TRANSIENT)
        for name, nbytes in kept.items():
            tape.add(name, nbytes)
        tape.sample()
        self.follow(tape, rank=rank)
        assert tape.total == sum(kept.values()), f"nobody let go of {tape.live}"
        tape.doing = "optimizer step"
        tape.work(state.step)
        return RankMemory(
            stage=self.rank.stage,
            rank=rank,
            role=ROLES[self._first.encodes] if own is None else self._model.keys[own],
            parts={name: nbytes for name, nbytes in tape.peak.items() if nbytes},
            when=tape.when,
            most={name: nbytes for name, nbytes in tape.highest.items() if nbytes},
            step=tape.total + state.step,
            host=self._host,
        )

    def follow(self, tape: Tape, *, rank: int) -> None:
        """Have ``tape`` see a step of such a rank."""
        given = {
            name: self._given(name, rank, tape)
            for name, each in self.rank.engine.encoders.items()
            if each.mode.around_schedule and self.rank.engine.own in (None, name)
        }
        self._first.payload = (  # type: ignore[method-assign]
            lambda entry, unit: self._stand_ins[entry.name].payload(unit, tape)
        )
        count = len(self.microbatches)
        walk = (BEGIN, END) if self._pipeline is None else events(self._pipeline, count)
        with one_rank(rank, tape):
            replays = [
                EncoderReplay(
                    self.rank.engine.encoders[name],
                    self._first,
                    microbatches,
                    trains=self.trains.get(name, ()),
                    away=self.states.get(name, State()).by_name(),
                    tape=tape,
                )
                for name, microbatches in given.items()
            ]
            traced, features = iter(self._turns), 0
            for event in walk:
                if isinstance(event, Turn):
                    tape.doing, each = event.name, next(traced)
                    tape.turn(DECODER, more=each.more, most=each.most)
                    tape.take(FEATURES, features)
                    features = 0
                    continue
                if event.event is Event.PASS:
                    tape.sample()
                if event == END:
                    tape.take(PIPELINE, self._buffers)
                    tape.take(DECODER, tape.live[DECODER])  # reports of losses
                for replay in replays:
                    replay.at(event)
                features += self._inline(tape, event)
                if event == BEGIN:
                    tape.add(PIPELINE, self._buffers)
        del self._first.payload

    def _inline(self, tape: Tape, when: When) -> int:
        """Encoders within the first chunk's forward: the bytes of features that it holds."""
        features = 0
        if when.event not in (Event.FORWARD, Event.GRADIENT):
            return features
        for entry in self._first.encoders:
            if self.rank.engine.encoders[entry.name].mode.around_schedule:
                continue
            assert when.microbatch is not None
            unit = self.microbatches[when.microbatch].units[entry.name]
            stand_in = self._stand_ins[entry.name]
            each = stand_in.of(unit.rows)
            stays = each.kept + each.given * each.keeps_given
            if when.event is Event.FORWARD:
                tape.doing = "forward"
                for region in (ENCODER, DECODER):  # lines above what is there for a moment
                    tape.add(region, 0)
                tape.turn(ENCODER, more=stays, most=each.given + each.forward)
                made = unit.tokens * stand_in.width * stand_in.dtype.itemsize
                tape.add(FEATURES, made)
                features += made
            else:
                tape.doing = "backward"
                tape.turn(ENCODER, more=-stays, most=each.backward)
        return features

    def _given(self, name: str, rank: int, tape: Tape) -> list[Microbatch]:
        """The microbatches, with what ``rank`` encodes of them around the decoder's schedule."""
        engine, encoder = self.rank.engine.encoders[name], self._model.encoder(name)
        place, units = engine.place, [each.units[name] for each in self.microbatches]
        replica: int | None = None
        if place.edge is not None:
            count = len(place.edge.replicas)
            assignment = assignment_of(self._args, encoder, replicas=count)
            if engine.step_planner is not None:
                assignment = replace(assignment, by_plan=engine.step_planner)
            shares = assignment.of_step([each.grids for each in units])
            units = [replace(unit, shares=each) for unit, each in zip(units, shares, strict=True)]
            replica = place.edge.replica_of(rank)
        elif engine.here and not self.rank.stage:
            replica = 0  # all of a unit is its share
        return [
            replace(each, units={name: _loaded(unit, replica, encoder, tape)})
            for each, unit in zip(self.microbatches, units, strict=True)
        ]


def _loaded(unit: Unit, replica: int | None, architecture: EncoderArchitecture, tape: Tape) -> Unit:
    """The unit with the media of a replica's share, where it has one."""
    for share in unit.shares:
        if share.encoder_replica == replica:
            numbers = range(len(unit.grids)) if share.media is None else share.media
            grids = [unit.grids[each] for each in numbers]
            return replace(unit, media=media_of(grids, architecture, tape=tape))
    return unit
