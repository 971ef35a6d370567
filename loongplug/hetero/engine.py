"""The encoder's side of a run: its parallel state, its units, its place in the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.exchange import Exchange
from loongplug.hetero.executor import Executor, Schedule
from loongplug.hetero.modes import Mode
from loongplug.hetero.operations import Kept, StepPlan
from loongplug.hetero.placement import Edge
from loongplug.hetero.policies import EncoderStep
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.live_layout import live_layout
from loongplug.parallel.module_state import ModuleState
from loongplug.parallel.states import (
    adopt_parallel_state,
    create_exchange_group,
    create_parallel_state,
    is_adopted,
    process_groups,
)
from loongplug.platform import current_platform


@dataclass(frozen=True, kw_only=True)
class EncoderPlace:
    """What is known once the process groups are there.

    ``edge`` is the encoder's in this rank's model replica, ``state`` the one that the encoder
    trains in, None where it lies on other ranks. ``replica_group`` has the ranks of the encoder
    replica that this rank encodes with; None where it does not encode.
    ``exchange_group`` has the edge's ranks; None on other ranks, and where nothing is exchanged.
    """

    edge: Edge
    state: ModuleState | None
    replica_group: dist.ProcessGroup | None
    exchange_group: dist.ProcessGroup | None


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
        timeout_minutes: float,
        nccl_config_path: str | None = None,
        recorder: Recorder = NOTHING,
    ) -> None:
        """``entry`` is the encoder's; ``encoder_tp``: as its YAML has it, None for nothing.

        ``taps`` are how many features of a token it has for the decoder's first layers.
        """
        self._mode = mode
        self._entry = entry
        self._encoder_tp = encoder_tp or mode.encoder_tp
        self._taps = taps
        self._seed = seed
        self._timeout = timeout_minutes
        self._nccl_config_path = nccl_config_path
        self.recorder = recorder
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

    def built(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Before the first step: the wrapped chunks and the optimizer of all modules."""
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
        edge, me = self.place.edge, dist.get_rank() if rank is None else rank
        return self._mode.policy(
            EncoderStep(
                encoder_replicas=encoder_replicas,
                replicas=len(edge.replicas),
                replica=edge.replica_of(me),
                consumes=me in edge.consumers,
                training=training,
                trains=trains,
                last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
                on_host=self._mode.on_host,
            )
        )

    def executor(self) -> Executor:
        """What does the plan of a step, one for the run. Collective like :attr:`place`."""
        if self._executor is None:
            assert self.steps, f"in the mode {self._mode.name}, the decoder's forward encodes"
            place = self.place
            exchange = Exchange(
                place.edge,
                place.exchange_group,
                device=current_platform().device,
                recorder=self.recorder,
            )
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

    def _build_groups(self) -> EncoderPlace:
        name, decoder, rank = self._entry.name, live_layout(), dist.get_rank()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        placement = self._mode.place(decoder, entry=self._entry, tp=self._encoder_tp or decoder.tp)
        edge = placement.edge(name, rank=rank)
        mine = edge.replica_of(rank)
        encoder = placement.entry(name).layout
        state: ModuleState | None = None
        if (encoder.tp, encoder.dp) == (decoder.tp, decoder.dp):
            state = ModuleState(groups=groups)
        else:
            if not is_adopted():  # the first encoder with a state of its own
                adopt_parallel_state()
            create_parallel_state(
                name,
                encoder,
                seed=self._seed,
                timeout_minutes=self._timeout,
                nccl_config_path=self._nccl_config_path,
            )
            if rank in encoder.ranks:
                state = ModuleState(
                    groups=process_groups(name),
                    state=name,
                    gradient_factor=placement.gradient_factor(name),
                )
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
            together = next(
                each
                for each in (groups.tp, state.groups.tp)
                if tuple(dist.get_process_group_ranks(each)) == edge.replicas[mine]
            )
        return EncoderPlace(
            edge=edge,
            state=state,
            replica_group=together,
            exchange_group=exchange_group,
        )


class Engine:
    """The engines of a run's encoders, in the entries' order; the same on every rank."""

    def __init__(self, encoders: Mapping[str, EncoderEngine], *, recorder: Recorder) -> None:
        self.encoders = encoders
        self.recorder = recorder

    @property
    def states(self) -> dict[str, ModuleState | None]:
        """The encoders' states by their entries' names, None where they lie on other ranks.

        Collective over all ranks when asked for the first time.
        """
        return {name: each.place.state for name, each in self.encoders.items()}

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
