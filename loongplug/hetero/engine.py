"""The encoder's side of a run: its parallel state, its units, its place in the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.hetero.edge import Edges, Piece, Transport, pieces_of
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.exchange import Exchange
from loongplug.hetero.executor import Executor, Schedule, unwrapped
from loongplug.hetero.intervals import overlaps
from loongplug.hetero.modes import Mode
from loongplug.hetero.operations import Kept, StepPlan
from loongplug.hetero.placement import Edge, Placement
from loongplug.hetero.policies import EncoderStep
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel
from loongplug.observe.recorder import NOTHING, Recorder
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
    ``replica_group`` has the ranks of the encoder replica that this rank encodes with; None where
    it does not encode.

    ``edge`` is the encoder's in this rank's model replica, and ``exchange_group`` has its ranks,
    None on other ranks, and where nothing is exchanged. Of an encoder on ranks of its own there is
    no such edge: there ``pieces`` are what a microbatch of all decoder replicas is made of, and
    ``transport`` are the groups of its edges; None on ranks at neither end.
    """

    state: ModuleState | None
    replica_group: dist.ProcessGroup | None
    edge: Edge | None = None
    exchange_group: dist.ProcessGroup | None = None
    pieces: tuple[Piece, ...] = ()
    transport: Transport | None = None

    def made_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that ``rank`` encodes, in their order."""
        return tuple(each for each in self.pieces if rank in each.edge.encoder_ranks)


class EncoderEngine:
    """Puts a mode's strategies to work for one encoder in one run; the same on every rank."""

    def __init__(
        self,
        mode: Mode,
        *,
        entry: Entry,
        encoder_tp: int | None,
        taps: int,
        seed: int,
        micro_batch_size: int,
        ahead: int,
        sequence_parallel: bool,
        timeout_minutes: float,
        nccl_config_path: str | None = None,
    ) -> None:
        """``entry`` is the encoder's; ``encoder_tp``: as its YAML has it, None for nothing.

        ``taps`` are how many features of a token it has for the decoder's first layers. ``ahead``
        are the forwards of the decoder's first chunk before its first backward.
        """
        self._mode = mode
        self._entry = entry
        self._encoder_tp = encoder_tp or mode.encoder_tp
        self._taps = taps
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._ahead = ahead
        self._sequence_parallel = sequence_parallel
        self._timeout = timeout_minutes
        self._nccl_config_path = nccl_config_path
        self.recorder: Recorder = NOTHING
        self._place: EncoderPlace | None = None
        self._executor: Executor | None = None

    @property
    def place(self) -> EncoderPlace:
        """Where the encoder is. Collective over all ranks when asked for the first time."""
        if self._place is None:
            self._place = self._build_groups()
        return self._place

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
            own = self.here and unwrapped(chunks[0]).trains(self._entry)
            trains = torch.tensor(int(own), device=current_platform().device)
            dist.all_reduce(trains, op=dist.ReduceOp.MAX)
            if self.place.transport is not None:
                self.executor().encoder_trains = bool(trains.item())
        if Kept.STATE in self._mode.on_host:
            name = self._entry.name
            self.executor().state = EncoderState(
                chunks[0].parts[name], optimizer.of_part[name], platform=current_platform()
            )

    def plan(
        self,
        *,
        encoder_replicas: tuple[int, ...],
        training: bool,
        trains: bool,
        rank: int | None = None,
    ) -> StepPlan:
        """Of a step, as this rank or another one of its tensor parallel group does it.

        ``encoder_replicas``: which one encodes each microbatch's unit; ``trains``: the encoder has
        gradients in this step, which is one of ``training``.
        """
        place, me = self.place, dist.get_rank() if rank is None else rank
        edge = place.edge
        replica = edge.replica_of(me) if edge else 0 if self.here else None
        consumes = (
            me in edge.consumers
            if edge
            else any(me in each.edge.decoder_ranks for each in place.pieces)
        )
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
                pieces=max(1, len(place.made_by(me))),
                warmup=self._ahead,
            )
        )

    def executor(self) -> Executor:
        """What does the plan of a step, one for the run. Collective like :attr:`place`."""
        if self._executor is None:
            assert self.steps, f"in the mode {self._mode.name}, the decoder's forward encodes"
            exchange = self._exchange()
            self._executor = Executor(
                self.plan,
                exchange,
                entry=self._entry,
                taps=self._taps,
                outside_schedule=self._mode.outside_schedule,
                platform=current_platform(),
                recorder=self.recorder,
            )
        return self._executor

    def alone(self) -> Schedule:
        """The schedule of one of its own ranks."""
        return self.executor().instead(len(self.place.made_by(dist.get_rank())))

    def _exchange(self) -> Exchange | Edges:
        place, device = self.place, current_platform().device
        if place.edge is None:
            return Edges(
                place.pieces, place.transport, window=2, device=device, recorder=self.recorder
            )
        return Exchange(place.edge, place.exchange_group, device=device, recorder=self.recorder)

    def _build_groups(self) -> EncoderPlace:
        name, decoder, rank = self._entry.name, decoder_layout(), dist.get_rank()
        placement = self._mode.place(decoder, entry=self._entry, tp=self._encoder_tp or decoder.tp)
        state = self._build_state(placement, decoder)
        if placement.is_apart(name):
            return self._apart(placement, state)
        assert rank in decoder.ranks, "rules refuse an encoder that lies where the decoder lies"
        edge = placement.edge(name, rank=rank)
        mine = edge.replica_of(rank)
        exchange_group = None
        if self._mode.around_schedule:
            exchange_group = create_exchange_group(
                name,
                placement.exchange_groups(name),
                options_of="mp" if placement.on_every_stage(name) else "tp",
                timeout_minutes=self._timeout,
                nccl_config_path=self._nccl_config_path,
            )
        # The ranks that encode one unit together: replicas of one decoder group, or one replica.
        together = None
        if mine is not None:
            assert state is not None, "a rank that encodes is of the encoder"
            decoders = ProcessGroupCollection.use_mpu_process_groups()
            together = next(
                each
                for each in (decoders.tp, state.groups.tp)
                if tuple(dist.get_process_group_ranks(each)) == edge.replicas[mine]
            )
        return EncoderPlace(
            edge=edge,
            state=state,
            replica_group=together,
            exchange_group=exchange_group,
        )

    def _build_state(self, placement: Placement, decoder: Layout) -> ModuleState | None:
        """The state that the encoder trains in. Collective over all ranks."""
        name, encoder = self._entry.name, placement.entry(self._entry.name).layout
        if (encoder.tp, encoder.dp) == (decoder.tp, decoder.dp) and not placement.is_apart(name):
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
        encoder, decoder = placement.entry(name).layout, decoder_layout()
        slot = overlaps(
            encoders=encoder.dp, decoders=decoder.dp, micro_batch_size=self._micro_batch_size
        )
        edges = placement.apart_edges(name, micro_batch_size=self._micro_batch_size)
        ranks = sorted({*encoder.ranks, *(r for each in edges for r in each.decoder_ranks)})
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
        return EncoderPlace(
            state=state,
            replica_group=replica,
            pieces=pieces_of(edges, slot),
            transport=transport,
        )


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
            name: each.executor() for name, each in self.encoders.items() if each.steps
        }

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Before the first step: the wrapped chunks and the optimizer of all modules."""
        for each in self.encoders.values():
            each.built(chunks, optimizer)
