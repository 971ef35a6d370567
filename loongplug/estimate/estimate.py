"""A run's memory, stage by stage, from its checked arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.estimate.ledger import Ledger
from loongplug.estimate.ranks import EstimatedRank, as_rank
from loongplug.estimate.state import State, Stepping, rank_state
from loongplug.estimate.step import EncoderCosts, Step
from loongplug.estimate.units import MicrobatchSize
from loongplug.training.arguments import ParsedArguments


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The fullest rank of a pipeline stage, in bytes.

    ``parts`` is what there is at its fullest moment of a step, ``when``, by what it is; ``most``
    has of each of these the most at any moment. ``step`` is all that there is in the optimizer's
    step. ``host`` is the most of the tensors that leave by name, which are none of these.
    """

    stage: int
    rank: int
    role: str
    parts: dict[str, int]
    when: str
    most: dict[str, int]
    step: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def estimate(
    parsed: ParsedArguments,
    microbatches: Sequence[MicrobatchSize],
    *,
    stepping: Stepping,
    on_stage: Callable[[int, int], None] = lambda stage, stages: None,
) -> list[RankMemory]:
    """The fullest rank of each pipeline stage of the first model replica.

    ``microbatches`` are those of a replica's step; ``stepping`` is how the run's optimizer
    works, which the machine decides; ``on_stage`` is told which of how many stages comes next. No
    collectives; there must be no process group. Makes no tensor with memory that grows with the
    model.
    """
    stages = parsed.args.pipeline_model_parallel_size
    found = []
    encoder_costs: EncoderCosts = {}  # all stages that encode have the same encoders
    for stage in range(stages):
        on_stage(stage, stages)
        with as_rank(parsed, stage * parsed.args.world_size // stages) as rank:
            found.append(
                _fullest(rank, parsed, microbatches, stepping=stepping, encoder_costs=encoder_costs)
            )
    return found


def _fullest(
    rank: EstimatedRank,
    parsed: ParsedArguments,
    microbatches: Sequence[MicrobatchSize],
    *,
    stepping: Stepping,
    encoder_costs: EncoderCosts,
) -> RankMemory:
    """Of the ranks of a tensor parallel group: they differ in the units that they encode."""
    args = parsed.args
    states = rank_state(rank.chunks, args, stepping=stepping)
    state = sum(states.values(), State())
    step = Step(rank, parsed, microbatches, states=states, encoder_costs=encoder_costs)
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
                role="encoder + decoder" if step.has_encoder else "decoder",
                parts={name: nbytes for name, nbytes in ledger.peak.items() if nbytes},
                when=ledger.when,
                most={name: nbytes for name, nbytes in ledger.most.items() if nbytes},
                step=ledger.live.total() + state.step,
                host=step.host,
            )
        )
    return max(found, key=lambda each: each.total)
