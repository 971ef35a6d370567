"""A run's memory, stage by stage, from its checked arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.estimate.ledger import Ledger
from loongplug.estimate.own_ranks import own_ranks_of
from loongplug.estimate.own_step import OwnStep
from loongplug.estimate.ranks import EstimatedRank, as_rank
from loongplug.estimate.state import State, Stepping, rank_state
from loongplug.estimate.step import ROLES, EncoderCosts, TracedStep
from loongplug.estimate.units import MicrobatchSize, UnitSize
from loongplug.training.arguments import ParsedArguments
from loongplug.training.rules.communicators import communicators_of


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
        """All of it."""
        return sum(self.parts.values())

    @property
    def place(self) -> str:
        """The stage in words."""
        return f"stage {self.stage}" + ("" if self.role in ROLES else f" of {self.role}")


class _Followed(Protocol):
    """A step of some ranks that have the same modules."""

    role: str
    host: int

    def follow(self, ledger: Ledger, *, rank: int) -> None:
        """Enter what the step of ``rank`` makes and frees."""


def estimate(
    parsed: ParsedArguments,
    microbatches: Sequence[MicrobatchSize],
    *,
    own_units: Mapping[str, Sequence[UnitSize]] = MappingProxyType({}),
    stepping: Stepping,
    on_stage: Callable[[int, int], None] = lambda stage, stages: None,
) -> list[RankMemory]:
    """The fullest rank of each pipeline stage: of the decoder's first replica, then of encoders.

    ``microbatches`` are those of a replica's step; ``own_units`` has of each encoder on ranks of
    its own the units of its busiest replica, which it is seen at. ``stepping`` is how the run's
    optimizer works, which the machine decides; ``on_stage`` is told which of how many stages comes
    next. No collectives; there must be no process group. Makes no tensor with memory that grows
    with the model.
    """
    own = own_ranks_of(parsed.args, parsed.model)
    stages = parsed.args.pipeline_model_parallel_size
    of_encoders = [(each, stage) for each in own for stage in range(each.layout.pp)]
    every = stages + len(of_encoders)
    found: dict[int, RankMemory] = {}
    trains = dict.fromkeys((each.name for each in own), False)
    # Encoders first, stage by stage: those behind hear whether they train.
    for number, (each, stage) in enumerate(of_encoders, stages):
        on_stage(number, every)
        with as_rank(parsed, each.rank(stage)) as rank:
            states = rank_state(rank.chunks, parsed.args, stepping=stepping)
            encoding = OwnStep(rank, parsed, own_units[each.name], trains_before=trains[each.name])
            trains[each.name] |= encoding.trains
            found[number] = _fullest(rank, encoding, states=states)
    encoder_costs: EncoderCosts = {}  # all stages that encode have the same encoders
    for stage in range(stages):
        on_stage(stage, every)
        with as_rank(parsed, stage * parsed.args.world_size // stages) as rank:
            states = rank_state(rank.chunks, parsed.args, stepping=stepping)
            step = TracedStep(
                rank,
                parsed,
                microbatches,
                states=states,
                encoder_costs=encoder_costs,
                trains_apart=trains,
            )
            found[stage] = _fullest(rank, step, states=states)
    in_order = [found[number] for number in range(every)]
    if parsed.args.target_device == "cpu":
        return in_order
    counted = communicators_of(parsed.args, parsed.model)
    return [replace(each, communicators=counted[each.rank].total) for each in in_order]


def _fullest(rank: EstimatedRank, step: _Followed, *, states: Mapping[str, State]) -> RankMemory:
    """Of the ranks of a tensor parallel group: they differ in the units that they encode."""
    state = sum(states.values(), State())
    found = []
    for member in dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()):
        ledger = Ledger()
        for name, nbytes in state.by_name().items():
            ledger.add(name, nbytes)
        step.follow(ledger, rank=member)
        ledger.work("optimizer step", state.step)
        found.append(
            RankMemory(
                stage=rank.stage,
                rank=member,
                role=step.role,
                parts={name: nbytes for name, nbytes in ledger.peak.items() if nbytes},
                when=ledger.when,
                most={name: nbytes for name, nbytes in ledger.most.items() if nbytes},
                step=ledger.live.total() + state.step,
                host=step.host,
            )
        )
    return max(found, key=lambda each: each.total)
