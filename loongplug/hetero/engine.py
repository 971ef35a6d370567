"""The encoder's side of a run: its parallel state, its units, its place in the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.hetero.bubble_planner import StepPlanner, StreamedCosts, StreamedStep
from loongplug.hetero.bubbles import create_pipeline_groups, filling
from loongplug.hetero.encoder_place import EncoderPlace, PlaceOfEncoder
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executed_step import Streaming
from loongplug.hetero.executor import Executor, Schedule, unwrapped
from loongplug.hetero.operations import Kept, StepPlan
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.piece_routes import (
    Crossings,
    apart_crossings,
    stage_links,
    streamed_crossings,
)
from loongplug.hetero.recorded_schedule import Pipeline, forwards_first
from loongplug.hetero.row_moves import ExchangeSpec
from loongplug.hetero.wire import Wire
from loongplug.models.multimodal import MultimodalModel
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.module_parts import ModuleState
from loongplug.parallel.states import TEXT_DECODER, decoder_layout
from loongplug.platform import current_platform


@dataclass(eq=False, kw_only=True)
class EncoderEngine:
    """Puts a mode's strategies to work for one encoder in one run; the same on every rank.

    ``found`` says where the encoder will be. ``taps`` are how many features of a token it has for
    the decoder's first layers. Units go through it together up to ``joined_rows`` of input.
    ``decoder`` is that one's first stage. ``costs`` are a step's, where the mode fills bubbles.
    """

    found: PlaceOfEncoder
    taps: int
    joined_rows: int = 0
    decoder: Pipeline
    costs: StreamedCosts | None = None
    recorder: Recorder = field(default=NOTHING, init=False)
    _executor: Executor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.mode = self.found.mode
        assert self.mode.fills_bubbles == (self.costs is not None), self.mode.name

    @cached_property
    def place(self) -> EncoderPlace:
        """Where the encoder is. Collective over all ranks when asked for the first time."""
        return self.found.build()

    @property
    def here(self) -> bool:
        """Whether it has ranks of its own, and this is one of them; collective as :attr:`place`."""
        return self.mode.apart and self.place.state is not None

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Take the chunks and the optimizer of all modules, before the first step. Collective.

        Of an encoder on ranks of its own, others hear if it trains.
        """
        if self.mode.apart:
            trains = torch.zeros(self._stages, dtype=torch.int, device=current_platform().device)
            if self.here:
                stage = self._stage_of(dist.get_rank())
                trains[stage] = unwrapped(chunks[0]).trains(self.found.entry)
            dist.all_reduce(trains, op=dist.ReduceOp.MAX)
            self.hear(trains.tolist())
        if Kept.STATE in self.mode.on_host:
            name = self.found.entry.name
            self.executor().host.state = EncoderState(
                chunks[0].parts[name], optimizer.of_part[name], platform=current_platform()
            )

    def hear(self, trains: Sequence[bool]) -> None:
        """Which stages of an encoder on ranks of its own train."""
        stage = self._stage_of(dist.get_rank()) if self.here else self._stages
        self.executor().encoder_trains = any(trains[: stage + 1])
        self.executor().trains_before = self.here and any(trains[:stage])

    def plan(self, *, training: bool, **of_step: Any) -> StepPlan:
        """The plan of a step on this rank; ``of_step`` are fields of :class:`EncoderStep`."""
        step = self.place.step(
            dist.get_rank(),
            training=training,
            decoder=self.decoder,
            last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            on_host=self.mode.on_host,
            joined_rows=self.joined_rows,
            **of_step,
        )
        return self.mode.policy(step)

    def executor(self) -> Executor:
        """The executor of the steps' plans, one for the run. Collective like :attr:`place`."""
        if self._executor is None:
            assert self.mode.around_schedule, "the decoder's forward encodes"
            self._executor = Executor(
                planned=self.plan,
                exchange=self._exchange(),
                entry=self.found.entry,
                taps=self.taps,
                outside_schedule=self.mode.outside_schedule,
                platform=current_platform(),
                carrier=self._carrier(),
                streaming=self._streaming(),
                recorder=self.recorder,
            )
        return self._executor

    def alone(self) -> Schedule:
        """The schedule of one of its own ranks."""
        rank = dist.get_rank()
        return self.executor().instead(
            {each: len(self.place.made_by(rank, training=each)) for each in (True, False)}
        )

    @property
    def _stages(self) -> int:
        """The encoder's own; it has one beside the decoder, whatever that has."""
        return 1 + len(self.found.handed_on)

    def _stage_of(self, rank: int) -> int:
        layout = self.place.layout
        return layout.coordinates(rank).pp if layout is not None and rank in layout.ranks else 0

    def crossings(
        self, units: ExchangeSpec, training: bool, streamed: StreamedStep | None, *, rank: int
    ) -> Crossings | None:
        """The crossings of a step that ``rank`` knows; None where its units are exchanged."""
        place, cp = self.place, decoder_layout().cp
        if place.pieces is not None:
            return apart_crossings(place.pieces[training], units, cp=cp, rank=rank)
        if streamed is None:
            return None
        assert place.edge is not None, "an encoder that streams lies on all ranks"
        return streamed_crossings(streamed.pieces, units, edge=place.edge, cp=cp, rank=rank)

    def _carrier(self) -> Carrier | None:
        place, rank = self.place, dist.get_rank()
        if not place.groups:
            return None
        behind, most = self._stages - 1 - self._stage_of(rank), inf
        if self.mode.apart:
            long = (3 + behind) * self.decoder.group  # a step that is not over before
            most, *_ = forwards_first(self.decoder, long, behind=behind)
        return Carrier(
            wire=Wire(
                place.groups, most=most, device=current_platform().device, recorder=self.recorder
            ),
            deals=self._dealer(place.deals),
            shares=self._dealer(place.replica_group if not behind else None),
            crossings=partial(self.crossings, rank=rank),
            links=(
                {}
                if place.layout is None
                else stage_links(place.layout, rank, widths=self.found.handed_on)
            ),
        )

    def _dealer(self, group: dist.ProcessGroup | None) -> Dealer | None:
        return None if group is None else Dealer(group, recorder=self.recorder)

    @cached_property
    def step_planner(self) -> StepPlanner | None:
        """Plans steps of training; None where none may stream. Collective like :attr:`place`."""
        if self.costs is None:
            return None
        decoder, edge = decoder_layout(), self.place.edge
        assert edge is not None, "an encoder that streams lies on all ranks"
        stages = [decoder.coordinates(ranks[0]).pp for ranks in edge.replicas]
        return StepPlanner(self.costs, stages=stages)

    def bubbles(self) -> Callable[[Schedule], Schedule]:
        """What is put around a schedule whose bubbles the steps may fill. Collective."""
        assert self.costs is not None, "steps may stream"
        executor, decoder = self.executor(), decoder_layout()
        groups = create_pipeline_groups(
            decoder.groups("pp"), virtual=len(self.costs.forward) > decoder.pp, **self.found.options
        )
        return partial(filling, executor=executor, groups=groups, recorder=self.recorder)

    def _streaming(self) -> Streaming | None:
        rank, planner, edge = dist.get_rank(), self.step_planner, self.place.edge
        if planner is None or edge is None:
            return None
        replica = edge.replica_of(rank)
        assert replica is not None, "the encoder lies on all ranks"
        return Streaming(planner, replica, decoder_layout().coordinates(rank).pp)

    def _exchange(self) -> AllToAll | None:
        place, device = self.place, current_platform().device
        if place.edge is None:
            return None
        return AllToAll(place.edge, place.exchange_group, device=device, recorder=self.recorder)


class Engine:
    """The engines of a run's encoders, in the entries' order; the same on every rank."""

    def __init__(self, encoders: Mapping[str, EncoderEngine]) -> None:
        self.encoders = encoders

    def report_to(self, recorder: Recorder) -> None:
        for each in self.encoders.values():
            each.recorder = recorder

    @cached_property
    def _bubbles(self) -> Callable[[Schedule], Schedule] | None:
        """Where steps may stream, of one encoder. Collective over all ranks."""
        streaming = [each for each in self.encoders.values() if each.mode.fills_bubbles]
        assert len(streaming) <= 1, "one streams"
        return streaming[0].bubbles() if streaming else None

    @property
    def states(self) -> dict[str, ModuleState | None]:
        """The entries' states by name, None where one lies on other ranks. Collective at first.

        The decoder is among them only where it lies on other ranks.
        """
        found = {name: each.place.state for name, each in self.encoders.items()}
        return found if self.decodes else {**found, TEXT_DECODER: None}

    @property
    def apart(self) -> tuple[EncoderEngine, ...]:
        return tuple(each for each in self.encoders.values() if each.mode.apart)

    @property
    def own(self) -> str | None:
        """The encoder that has this rank for itself; None where the decoder has it. Collective."""
        here = [name for name, each in self.encoders.items() if each.here]  # every rank asks all
        assert len(here) <= 1, here
        return here[0] if here else None

    @property
    def decodes(self) -> bool:
        """Whether the decoder has this rank. Collective like an encoder's place."""
        return self.own is None

    @property
    def steps(self) -> bool:
        """Whether something is put around the decoder's schedules."""
        return any(each.mode.around_schedule for each in self.encoders.values())

    def schedules(self, get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        """Wrap Megatron's ``get_forward_backward_func``, for modes of which one :attr:`steps`.

        The encoders nest, the first outermost, alike on every rank. One that streams is innermost:
        its plan begins with the schedule.
        """

        def get_forward_backward_func(*args: object, **kwargs: object) -> Schedule:
            if self.own is not None:
                return self.encoders[self.own].alone()
            schedule = get_schedule(*args, **kwargs)
            if self._bubbles is not None:
                schedule = self._bubbles(schedule)
            nested = [each for each in self.encoders.values() if each.mode.around_schedule]
            nested.sort(key=lambda each: each.mode.fills_bubbles)
            for each in reversed(nested):
                schedule = each.executor().around(schedule)
            return schedule

        return get_forward_backward_func

    def attach(self, chunk: MultimodalModel) -> None:
        """Have a chunk ask these engines for features, where its forward does not make them."""
        chunk.feature_sources = {
            name: each.executor().features
            for name, each in self.encoders.items()
            if each.mode.around_schedule and (self.decodes or each.here)
        }

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Before the first step: the wrapped chunks and the optimizer of all modules."""
        for each in self.encoders.values():
            each.built(chunks, optimizer)
