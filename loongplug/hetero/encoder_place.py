"""Where an encoder is in a run, once the process groups are there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.hetero.modes import Mode
from loongplug.hetero.operations import Cargo, EncoderStep
from loongplug.hetero.placement import (
    ApartPiece,
    Edge,
    Pair,
    Placement,
    apart_pairs,
    piece_pairs,
    stage_pairs,
    there_and_back,
)
from loongplug.hetero.recorded_schedule import Pipeline, forwards_first
from loongplug.models.entries import Entry
from loongplug.parallel.exchange_groups import create_exchange_group
from loongplug.parallel.layout import Layout
from loongplug.parallel.module_parts import ModuleState
from loongplug.parallel.states import (
    adopt_parallel_state,
    create_parallel_state,
    decoder_layout,
    is_adopted,
    process_groups,
)

_FEATURES = Cargo.FEATURES, Cargo.GRADIENTS
_STATES = Cargo.STATES, Cargo.STATE_GRADIENTS


@dataclass(frozen=True, kw_only=True)
class EncoderPlace:
    """An encoder's place, as one rank knows it.

    ``state`` is the one that the encoder trains in, None where it lies on other ranks.
    ``replica_group`` has the ranks of the encoder replica that this rank encodes with, of its own
    stage alone; None where it does not encode. ``edge`` is the encoder's in this rank's model
    replica, and ``exchange_group`` has its ranks, None where nothing is exchanged. Of an encoder on
    ranks of its own there is no edge: there ``layout`` is the encoder's, and ``pieces`` are what a
    microbatch of all decoder replicas is made of, in training and in evaluation.

    Where a mode sends rows point to point, ``groups`` are what they go over, each None on ranks at
    neither end. ``deals`` is what the decoder's first stage deals in then: its tensor parallel
    group, with context parallel ranks where these encode, too; None on ranks of no decoder.
    """

    state: ModuleState | None
    replica_group: dist.ProcessGroup | None
    edge: Edge | None = None
    exchange_group: dist.ProcessGroup | None = None
    layout: Layout | None = None
    pieces: Mapping[bool, tuple[ApartPiece, ...]] | None = None  # by whether a step is of training
    groups: Mapping[Cargo, dist.ProcessGroup | None] = MappingProxyType({})
    deals: dist.ProcessGroup | None = None

    def made_by(self, rank: int, *, training: bool) -> tuple[ApartPiece, ...]:
        if self.pieces is None or self.layout is None or rank not in self.layout.ranks:
            return ()
        replica = self.layout.coordinates(rank).dp
        return tuple(each for each in self.pieces[training] if each.replica == replica)

    def step(self, rank: int, *, training: bool, decoder: Pipeline, **of_step: Any) -> EncoderStep:
        """What a policy knows of a step of ``rank``; ``of_step`` does not follow from the place."""
        of_step["training"] = training
        if self.edge is not None:
            return EncoderStep(
                replicas=len(self.edge.replicas),
                replica=self.edge.replica_of(rank),
                consumes=rank in self.edge.consumers,
                **of_step,
            )
        if self.layout is None or rank not in self.layout.ranks:
            pieces = () if self.pieces is None else self.pieces[training]
            consumes = any(rank in each.edge.consumers for each in pieces)
            return EncoderStep(replicas=1, replica=None, consumes=consumes, **of_step)
        stage, stages = self.layout.coordinates(rank).pp, self.layout.pp
        behind = stages - 1 - stage
        made = max(1, len(self.made_by(rank, training=training)))
        count = len(of_step["encoder_replicas"]) // made if of_step["trains"] else 0
        return EncoderStep(
            replicas=1,
            replica=0,
            consumes=False,
            pieces=made,
            forwards=forwards_first(decoder, count, behind=behind) if count else (),
            stage=stage,
            stages=stages,
            **of_step,
        )

    def given_media(self, rank: int) -> tuple[int, ...]:
        """The first stage's ranks of the replica that ``rank`` is of, ascending."""
        assert self.layout is not None, "the encoder has no ranks of its own"
        return tuple(self.layout.stage(0)[self.layout.coordinates(rank).dp])


@dataclass(frozen=True, kw_only=True)
class PlaceOfEncoder:
    """What an encoder's place follows from; the same on every rank.

    ``entry`` is the encoder's; ``encoder_tp``: as its YAML has it, None for nothing. ``handed_on``
    are the widths of what each of its stages but the last hands on, ``micro_batch_sizes`` of a step
    of training (True) and of evaluation.
    """

    mode: Mode
    entry: Entry
    encoder_tp: int | None
    handed_on: tuple[int, ...] = ()
    seed: int
    micro_batch_sizes: Mapping[bool, int]
    timeout_minutes: float
    nccl_config_path: str | None = None

    def build(self) -> EncoderPlace:
        """The process groups, and this rank's place. Collective over all ranks."""
        name, decoder, rank = self.entry.name, decoder_layout(), dist.get_rank()
        tp = self.encoder_tp or self.mode.encoder_tp or decoder.tp
        placement = self.mode.place(decoder, entry=self.entry, tp=tp)
        state = self._build_state(placement, decoder)
        if placement.is_apart(name):
            return self._apart(placement, decoder, state)
        exchange_group, groups = None, dict[Cargo, dist.ProcessGroup | None]()
        if self.mode.around_schedule:
            of_stage = "tp" if decoder.cp == 1 else "tp_cp"
            exchange_group = create_exchange_group(
                name,
                [edge.ranks for edge in placement.edges(name)],
                options_of="mp" if placement.on_every_stage(name) else of_stage,
                **self.options,
            )
        if self.mode.fills_bubbles:
            edges = placement.edges(name)
            pairs = piece_pairs(edges, cp=decoder.cp)
            groups = self._wired([edge.ranks for edge in edges], pairs, _FEATURES, options_of="mp")
        if rank not in decoder.ranks:  # another encoder's own
            return EncoderPlace(state=None, replica_group=None)
        edge = placement.edge(name, rank=rank)
        mine = edge.replica_of(rank)
        # The ranks that encode one unit together: replicas of one decoder group, or one replica.
        together, decoders = None, ProcessGroupCollection.use_mpu_process_groups()
        if mine is not None:
            assert state is not None, "a rank that encodes is of the encoder"
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
            groups=groups,
            deals=decoders.tp if decoder.cp == 1 else decoders.tp_cp,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "timeout_minutes": self.timeout_minutes,
            "nccl_config_path": self.nccl_config_path,
        }

    def _build_state(self, placement: Placement, decoder: Layout) -> ModuleState | None:
        """The state that the encoder trains in. Collective over all ranks."""
        name, encoder = self.entry.name, placement.entry(self.entry.name).layout
        if (encoder.tp, encoder.dp) == (decoder.tp, decoder.dp) and not placement.is_apart(name):
            if dist.get_rank() not in decoder.ranks:
                return None
            return ModuleState(groups=ProcessGroupCollection.use_mpu_process_groups())
        if not is_adopted():  # the first encoder with a state of its own
            adopt_parallel_state()
        create_parallel_state(name, encoder, seed=self.seed, **self.options)
        if dist.get_rank() not in encoder.ranks:
            return None
        factor = placement.gradient_factor(name)
        return ModuleState(groups=process_groups(name), state=name, gradient_factor=factor)

    def _apart(
        self, placement: Placement, decoder: Layout, state: ModuleState | None
    ) -> EncoderPlace:
        """On ranks of its own. Collective over all ranks."""
        name, rank = self.entry.name, dist.get_rank()
        encoder = placement.entry(name).layout
        pieces = {
            training: placement.pieces(name, micro_batch_size=size)
            for training, size in self.micro_batch_sizes.items()
        }
        # Every decoder replica needs its samples, whatever their number.
        consumers = {rank for each in pieces[True] for rank in each.edge.consumers}
        ranks = sorted({*chain(*encoder.stage(-1)), *consumers})
        pairs = apart_pairs(chain(*pieces.values()), cp=decoder.cp)
        groups = self._wired([ranks], pairs, _FEATURES, options_of="pp")
        groups |= self._wired([encoder.ranks], stage_pairs(encoder), _STATES, options_of="pp")
        deals = None
        if rank in decoder.ranks:
            deals = ProcessGroupCollection.use_mpu_process_groups().tp
        return EncoderPlace(
            state=state,
            replica_group=None if state is None else state.groups.tp,
            layout=encoder,
            pieces=pieces,
            groups=groups,
            deals=deals,
        )

    def _wired(
        self,
        ranks: Sequence[Sequence[int]],
        pairs: Sequence[Pair],
        ways: tuple[Cargo, Cargo],
        *,
        options_of: str,
    ) -> dict[Cargo, dist.ProcessGroup | None]:
        """Groups of ``ranks`` for what ``pairs`` send, and for what comes back. Collective."""
        options = {"options_of": options_of, **self.options}
        return {
            what: create_exchange_group(
                f"{self.entry.name}_{what.name}", ranks, pairs=some, **options
            )
            for what, some in zip(ways, there_and_back(pairs), strict=True)
        }
