"""The encoder's side of a run: its parallel state, its units, its place in the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.hetero.edge import WINDOW, Edges, Transport
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.exchange import Exchange
from loongplug.hetero.executor import Executor, Schedule, unwrapped
from loongplug.hetero.modes import Mode
from loongplug.hetero.operations import Kept, StepPlan
from loongplug.hetero.piece_edges import PieceEdges, PieceGroups, create_piece_groups
from loongplug.hetero.piece_work import Streaming
from loongplug.hetero.pipeline_graph import in_flight, warmup
from loongplug.hetero.pipeline_wires import PipelineGroups, create_pipeline_groups
from loongplug.hetero.placement import Edge, Piece, Placement
from loongplug.hetero.policies import EncoderStep, Stream
from loongplug.hetero.stage_links import StageLink, StageLinks, boundaries
from loongplug.hetero.streamed_pieces import Planner, StreamedCosts
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.connections import connect
from loongplug.parallel.layout import Layout
from loongplug.parallel.module_state import ModuleState
from loongplug.parallel.states import (
    TEXT_DECODER,
    adopt_parallel_state,
    create_exchange_group,
    create_parallel_state,
    decoder_layout,
    is_adopted,
    process_groups,
)
from loongplug.platform import current_platform


@dataclass(frozen=True, kw_only=True)
class EncoderPlace:
    """What is known once the process groups are there.

    ``state`` is the one that the encoder trains in, None where it lies on other ranks.
    ``replica_group`` has the ranks of the encoder replica that this rank encodes with, of its own
    stage alone; None where it does not encode.

    ``edge`` is the encoder's in this rank's model replica, and ``exchange_group`` has its ranks,
    None on other ranks, and where nothing is exchanged. Of an encoder on ranks of its own there is
    no such edge: there ``layout`` is the encoder's, ``pieces`` are what a microbatch of all decoder
    replicas is made of, in training and in evaluation, and ``transport`` are the groups of its
    edges; None on ranks at neither end. Where it has stages, ``before`` and ``behind`` are this
    rank's links to others.

    Where encoders fill the decoder's bubbles, ``piece_groups`` are what pieces go over, and
    ``pipeline_groups`` what goes between the decoder's stages meanwhile.
    """

    state: ModuleState | None
    replica_group: dist.ProcessGroup | None
    edge: Edge | None = None
    exchange_group: dist.ProcessGroup | None = None
    layout: Layout | None = None
    pieces: Mapping[bool, tuple[Piece, ...]] | None = None  # by whether a step is of training
    transport: Transport | None = None
    before: StageLink | None = None
    behind: StageLink | None = None
    piece_groups: PieceGroups | None = None
    pipeline_groups: PipelineGroups | None = None

    def made_by(self, rank: int, *, training: bool) -> tuple[Piece, ...]:
        """The pieces that ``rank`` encodes, or has a stage of, in their order.

        There are none where it encodes whole units.
        """
        if self.pieces is None or self.layout is None or rank not in self.layout.ranks:
            return ()
        replica = self.layout.coordinates(rank).dp
        return tuple(each for each in self.pieces[training] if each.edge.encoder == replica)

    def needed_by(self, rank: int, *, training: bool) -> tuple[Piece, ...]:
        """The pieces that ``rank`` decodes, in the order of their samples."""
        pieces = () if self.pieces is None else self.pieces[training]
        return tuple(each for each in pieces if rank in each.edge.decoder_ranks)

    def given_media(self, rank: int) -> tuple[int, ...]:
        """The first stage's ranks of the replica that ``rank`` is of, ascending."""
        assert self.layout is not None, "the encoder has no ranks of its own"
        return tuple(self.layout.stage(0)[self.layout.coordinates(rank).dp])


class EncoderEngine:
    """Puts a mode's strategies to work for one encoder in one run; the same on every rank."""

    def __init__(
        self,
        mode: Mode,
        *,
        entry: Entry,
        encoder_tp: int | None,
        taps: int,
        handed_on: tuple[int, ...] = (),
        joined_rows: int = 0,
        seed: int,
        micro_batch_sizes: Mapping[bool, int],
        ahead: int,
        sequence_parallel: bool,
        timeout_minutes: float,
        nccl_config_path: str | None = None,
        costs: StreamedCosts | None = None,
    ) -> None:
        """``entry`` is the encoder's; ``encoder_tp``: as its YAML has it, None for nothing.

        ``taps`` are how many features of a token it has for the decoder's first layers.
        ``handed_on`` are the widths of what each of its stages but the last hands on. Units go
        through it together up to ``joined_rows`` of input. ``ahead`` are the forwards of the
        decoder's first chunk before its first backward.
        ``micro_batch_sizes``: of a step of training (True) and of evaluation. ``costs`` are a
        step's, where the mode fills bubbles.
        """
        assert mode.fills_bubbles == (costs is not None), mode.name
        self._mode = mode
        self._entry = entry
        self._encoder_tp = encoder_tp or mode.encoder_tp
        self._taps = taps
        self._handed_on = handed_on
        self._joined_rows = joined_rows
        self._seed = seed
        self._micro_batch_sizes = micro_batch_sizes
        self._ahead = ahead
        self._sequence_parallel = sequence_parallel
        self._timeout = timeout_minutes
        self._nccl_config_path = nccl_config_path
        self._costs = costs
        self.recorder: Recorder = NOTHING
        self._trains_before = False  # in a stage of an encoder apart: whether one before it does
        self._place: EncoderPlace | None = None
        self._executor: Executor | None = None

    @property
    def place(self) -> EncoderPlace:
        """Where the encoder is. Collective over all ranks when asked for the first time."""
        if self._place is None:
            self._place = self._build_groups()
        return self._place

    @cached_property
    def planner(self) -> Planner | None:
        """Plans steps that stream, in training; None in modes without. Collective as `place`."""
        edge = self.place.edge
        if self._costs is None or edge is None:
            return None
        decoder = decoder_layout()
        stages = tuple(decoder.coordinates(ranks[0]).pp for ranks in edge.replicas)
        return Planner(self._costs, stages=stages)

    @property
    def steps(self) -> bool:
        """Whether something is put around the decoder's schedules."""
        return self._mode.around_schedule

    @property
    def apart(self) -> bool:
        """Whether the encoder lies on ranks of its own."""
        return self._mode.apart

    @property
    def here(self) -> bool:
        """Whether these are ranks of its own, and this is one of them; collective as `place`."""
        return self.apart and self.place.state is not None

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Before the first step: the wrapped chunks and the optimizer of all modules.

        Collective over all ranks for an encoder on ranks of its own: others hear if it trains.
        """
        if self.apart:
            trains = torch.zeros(self._stages, dtype=torch.int, device=current_platform().device)
            stage = self._stage_of(dist.get_rank()) if self.here else self._stages
            if self.here:
                trains[stage] = unwrapped(chunks[0]).trains(self._entry)
            dist.all_reduce(trains, op=dist.ReduceOp.MAX)
            if self.here or self.place.transport is not None:
                self._trains_before = self.here and bool(trains[:stage].any())
                self.executor().encoder_trains = bool(trains[: stage + 1].any())
                self.executor().trains_before = self._trains_before
        if Kept.STATE in self._mode.on_host:
            name = self._entry.name
            self.executor().state = EncoderState(
                chunks[0].parts[name], optimizer.of_part[name], platform=current_platform()
            )

    def plan(
        self,
        *,
        encoder_replicas: tuple[tuple[int, ...], ...],
        training: bool,
        trains: bool,
        rows: tuple[int, ...] = (),
        trains_before: bool | None = None,  # in stages before; None: as :meth:`built` has heard
        rank: int | None = None,
        stream: Stream | None = None,
    ) -> StepPlan:
        """Of a step, as this rank or another one of its tensor parallel group does it.

        ``encoder_replicas``: which ones encode shares of each microbatch's unit; ``trains``: the
        encoder has gradients in this step, which is one of ``training``. ``rows``: of the encoder's
        input, what that rank encodes of each unit; none where all units go by themselves.
        ``stream``: the rank's, of a step that streams.
        """
        place, me = self.place, dist.get_rank() if rank is None else rank
        edge, pieces = place.edge, max(1, len(place.made_by(me, training=training)))
        stage = self._stage_of(me)
        replica = edge.replica_of(me) if edge else 0 if self.here else None
        needed = place.needed_by(me, training=training)
        consumes = me in edge.consumers if edge else bool(needed)
        return self._mode.policy(
            EncoderStep(
                encoder_replicas=encoder_replicas,
                replicas=len(edge.replicas) if edge else 1,
                replica=replica,
                consumes=consumes,
                training=training,
                trains=trains,
                last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
                on_host=self._mode.on_host,
                rows=rows,
                joined_rows=self._joined_rows,
                pieces=pieces,
                warmup=warmup(
                    microbatches=len(encoder_replicas) // pieces,
                    ahead=self._ahead,
                    stages=self._stages,
                    stage=stage,
                ),
                stage=stage,
                stages=self._stages,
                trains_before=training
                and (self._trains_before if trains_before is None else trains_before),
                stream=stream,
            )
        )

    def executor(self) -> Executor:
        """What does the plan of a step, one for the run. Collective like :attr:`place`."""
        if self._executor is None:
            assert self.steps, f"in the mode {self._mode.name}, the decoder's forward encodes"
            self._executor = Executor(
                self.plan,
                self._exchange(training=True),
                evaluating=self._exchange(training=False),
                entry=self._entry,
                taps=self._taps,
                outside_schedule=self._mode.outside_schedule,
                platform=current_platform(),
                links=self._links(),
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

    def in_flight(self, rank: int) -> int:
        """Of how many microbatches ``rank`` may be sending at a time."""
        return in_flight(ahead=self._ahead, stages=self._stages, stage=self._stage_of(rank))

    @property
    def _stages(self) -> int:
        """The encoder's own; it has one beside the decoder, whatever that has."""
        return 1 + len(self._handed_on)

    def _stage_of(self, rank: int) -> int:
        layout = self.place.layout
        return layout.coordinates(rank).pp if layout is not None and rank in layout.ranks else 0

    def _links(self) -> StageLinks | None:
        before, behind, device = self.place.before, self.place.behind, current_platform().device
        if before is None and behind is None:
            return None
        return StageLinks(
            before=before,
            behind=behind,
            window=WINDOW,
            in_flight=self.in_flight(dist.get_rank()),
            device=device,
            recorder=self.recorder,
        )

    def _streaming(self) -> Streaming | None:
        place, planner, rank = self.place, self.planner, dist.get_rank()
        if planner is None:
            return None
        assert place.edge is not None
        assert place.piece_groups is not None
        assert place.pipeline_groups is not None
        replica = place.edge.replica_of(rank)
        assert replica is not None, "the encoder lies on all ranks"
        return Streaming(
            planner,
            PieceEdges(
                place.edge,
                place.piece_groups,
                window=WINDOW,
                device=current_platform().device,
                recorder=self.recorder,
            ),
            groups=place.pipeline_groups,
            replica=replica,
            stage=decoder_layout().coordinates(rank).pp,
            recorder=self.recorder,
        )

    def _exchange(self, *, training: bool) -> Exchange | Edges:
        place, device = self.place, current_platform().device
        if place.pieces is not None:
            return Edges(
                place.pieces[training],
                place.transport,
                window=WINDOW,
                in_flight=self.in_flight(dist.get_rank()),
                device=device,
                recorder=self.recorder,
            )
        assert place.edge is not None
        return Exchange(place.edge, place.exchange_group, device=device, recorder=self.recorder)

    def _build_groups(self) -> EncoderPlace:
        name, decoder, rank = self._entry.name, decoder_layout(), dist.get_rank()
        placement = self._mode.place(decoder, entry=self._entry, tp=self._encoder_tp or decoder.tp)
        state = self._build_state(placement, decoder)
        if placement.is_apart(name):
            return self._apart(placement, state)
        exchange_group = None
        of_stage = "tp" if decoder.cp == 1 else "tp_cp"
        if self._mode.around_schedule:
            exchange_group = create_exchange_group(
                name,
                placement.exchange_groups(name),
                options_of="mp" if placement.on_every_stage(name) else of_stage,
                timeout_minutes=self._timeout,
                nccl_config_path=self._nccl_config_path,
            )
        piece_groups = pipeline_groups = None
        if self._costs is not None:
            options: dict[str, Any] = {
                "device": current_platform().device,
                "timeout_minutes": self._timeout,
                "nccl_config_path": self._nccl_config_path,
            }
            piece_groups = create_piece_groups(name, placement.edges(name), **options)
            pipeline_groups = create_pipeline_groups(
                decoder.groups("pp"),
                virtual=len(self._costs.forward) > decoder.pp,
                **options,
            )
        if rank not in decoder.ranks:  # another encoder's own
            return EncoderPlace(state=None, replica_group=None)
        edge = placement.edge(name, rank=rank)
        mine = edge.replica_of(rank)
        # The ranks that encode one unit together: replicas of one decoder group, or one replica.
        together = None
        if mine is not None:
            assert state is not None, "a rank that encodes is of the encoder"
            decoders = ProcessGroupCollection.use_mpu_process_groups()
            together = next(
                each
                for each in (decoders.tp, decoders.tp_cp, state.groups.tp)
                if tuple(dist.get_process_group_ranks(each)) == edge.replicas[mine]
            )
        return EncoderPlace(
            edge=edge,
            state=state,
            replica_group=together,
            exchange_group=exchange_group,
            piece_groups=piece_groups,
            pipeline_groups=pipeline_groups,
        )

    def _build_state(self, placement: Placement, decoder: Layout) -> ModuleState | None:
        """The state that the encoder trains in. Collective over all ranks."""
        name, encoder = self._entry.name, placement.entry(self._entry.name).layout
        if (encoder.tp, encoder.dp) == (decoder.tp, decoder.dp) and not placement.is_apart(name):
            if dist.get_rank() not in decoder.ranks:
                return None
            return ModuleState(groups=ProcessGroupCollection.use_mpu_process_groups())
        if not is_adopted():  # the first encoder with a state of its own
            adopt_parallel_state()
        create_parallel_state(
            name,
            encoder,
            seed=self._seed,
            timeout_minutes=self._timeout,
            nccl_config_path=self._nccl_config_path,
        )
        if dist.get_rank() not in encoder.ranks:
            return None
        return ModuleState(
            groups=process_groups(name),
            state=name,
            gradient_factor=placement.gradient_factor(name),
        )

    def _apart(self, placement: Placement, state: ModuleState | None) -> EncoderPlace:
        """On ranks of its own. Collective over all ranks."""
        name, rank = self._entry.name, dist.get_rank()
        encoder = placement.entry(name).layout
        pieces = {
            training: placement.pieces(name, micro_batch_size=size)
            for training, size in self._micro_batch_sizes.items()
        }
        # Every decoder replica needs its samples, whatever their number.
        consumers = {rank for each in pieces[True] for rank in each.edge.decoder_ranks}
        ranks = sorted({*chain(*encoder.stage(-1)), *consumers})
        groups = [
            create_exchange_group(
                f"{name}_{direction}",
                [ranks],
                options_of="pp",
                timeout_minutes=self._timeout,
                nccl_config_path=self._nccl_config_path,
            )
            for direction in ("features", "gradients")
        ]
        decoder = decoder_layout()
        parts = decoder.sequence_shards(sequence_parallel=self._sequence_parallel)
        pairs = sorted(
            {
                (sender, receiver)
                for each in chain(*pieces.values())
                for sender in each.edge.feature_senders
                for receiver in each.edge.feature_receivers(parts=parts)
            }
        )
        self._connect(groups, pairs)
        transport = replica = None
        if state is not None:
            replica = together = state.groups.tp
        elif not self._sequence_parallel and rank in ranks:
            together = ProcessGroupCollection.use_mpu_process_groups().tp
        else:
            together = None
        if rank in ranks:
            there, back = groups
            assert there is not None
            assert back is not None
            alone = together is None or together.size() == 1
            transport = Transport(there=there, back=back, together=None if alone else together)
        before, behind = self._stage_links(encoder)
        return EncoderPlace(
            state=state,
            replica_group=replica,
            layout=encoder,
            pieces=pieces,
            transport=transport,
            before=before,
            behind=behind,
        )

    def _stage_links(self, encoder: Layout) -> tuple[StageLink | None, StageLink | None]:
        """This rank's to the stages before and behind its own. Collective over all ranks."""
        name, rank = self._entry.name, dist.get_rank()
        links: dict[int, StageLink] = {}  # by the boundary between two stages
        for boundary, ranks in enumerate(boundaries(encoder)):
            there, back = groups = [
                create_exchange_group(
                    f"{name}_{direction}_{boundary}",
                    [ranks],
                    options_of="pp",
                    timeout_minutes=self._timeout,
                    nccl_config_path=self._nccl_config_path,
                )
                for direction in ("states", "gradients")
            ]
            pipelines = encoder.groups("pp")
            self._connect(groups, [(each[boundary], each[boundary + 1]) for each in pipelines])
            if there is None or back is None:
                continue
            own, pipeline = encoder.coordinates(rank).pp, encoder.group("pp", rank)
            links[boundary] = StageLink(
                peer=pipeline[boundary + 1 if own == boundary else boundary],
                there=there,
                back=back,
                width=self._handed_on[boundary],
            )
        stage = encoder.coordinates(rank).pp if rank in encoder.ranks else 0
        return links.get(stage - 1), links.get(stage)

    def _connect(
        self, groups: Sequence[dist.ProcessGroup | None], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Both groups' connections: what goes there from the first of each pair, and back."""
        there, back = groups
        device = current_platform().device
        connect(there, pairs, device=device)
        connect(back, [(receiver, sender) for sender, receiver in pairs], device=device)


class Engine:
    """The engines of a run's encoders, in the entries' order; the same on every rank."""

    def __init__(self, encoders: Mapping[str, EncoderEngine]) -> None:
        self.encoders = encoders

    def report_to(self, recorder: Recorder) -> None:
        """Have exchanges report there, from the first step on."""
        for each in self.encoders.values():
            each.recorder = recorder

    @property
    def states(self) -> dict[str, ModuleState | None]:
        """The entries' states by name, None where one lies on other ranks.

        The decoder is among them only where it lies on other ranks. Collective over all ranks when
        asked for the first time.
        """
        found = {name: each.place.state for name, each in self.encoders.items()}
        return found if self.decodes else {**found, TEXT_DECODER: None}

    @property
    def apart(self) -> tuple[EncoderEngine, ...]:
        """Those of encoders on ranks of their own."""
        return tuple(each for each in self.encoders.values() if each.apart)

    @property
    def own(self) -> str | None:
        """The encoder that has this rank for itself; None where the decoder has it.

        Collective like an encoder's place.
        """
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
        return any(each.steps for each in self.encoders.values())

    def schedules(self, get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        """Wrap Megatron's ``get_forward_backward_func``, for modes of which one :attr:`steps`.

        The encoders nest, the first outermost: it begins a step first and ends it last. Before a
        forward, the last acts first. What counts is that the order is every rank's.
        """

        def get_forward_backward_func(*args: object, **kwargs: object) -> Schedule:
            if self.own is not None:
                return self.encoders[self.own].alone()
            schedule = get_schedule(*args, **kwargs)
            for each in reversed([each for each in self.encoders.values() if each.steps]):
                schedule = each.executor().around(schedule)
            return schedule

        return get_forward_backward_func

    def attach(self, chunk: MultimodalModel) -> None:
        """Have a chunk ask these engines for features, where its forward does not make them."""
        chunk.feature_sources = {
            name: each.executor()
            for name, each in self.encoders.items()
            if each.steps and (self.decodes or each.here)
        }

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Before the first step: the wrapped chunks and the optimizer of all modules."""
        for each in self.encoders.values():
            each.built(chunks, optimizer)
