"""A run's memory, stage by stage, from its checked arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.estimate.microbatches import StepOf, pieces_of
from loongplug.estimate.own_ranks import own_ranks_of
from loongplug.estimate.ranks import EstimatedRank, as_rank
from loongplug.estimate.state import State, Stepping, rank_state
from loongplug.estimate.step import ROLES, EncoderBytes, EstimatedStep
from loongplug.estimate.tape import TRANSIENT, Tape
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


def estimate(
    parsed: ParsedArguments,
    step_of: StepOf,
    *,
    stepping: Stepping,
    on_stage: Callable[[int, int], None] = lambda stage, stages: None,
) -> list[RankMemory]:
    """The fullest rank of each pipeline stage: of the decoder's first replica, then of encoders.

    ``step_of`` gives the microbatches of a step; an encoder on ranks of its own is seen at its
    busiest replica. ``stepping`` is how the run's optimizer works, which the machine decides;
    ``on_stage`` is told which of how many stages comes next. No collectives; there must be no
    process group. Makes no tensor with memory that grows with the model.
    """
    args, model = parsed.args, parsed.model
    own, stages = own_ranks_of(args, model), args.pipeline_model_parallel_size
    ranks = [stage * args.world_size // stages for stage in range(stages)]
    steps = [step_of(0)] * stages
    for each in own:
        ranks += [each.rank(stage) for stage in range(each.layout.pp)]
        encoder = model.encoder(each.name)
        steps += [pieces_of(each, step_of, encoder=encoder, packed=args.packing)] * each.layout.pp
    trains = {each.name: [False] * each.layout.pp for each in own}
    traced: EncoderBytes = {}  # all stages that encode have the same encoders
    found: dict[int, RankMemory] = {}
    # Encoders first, stage by stage: those behind hear whether they train.
    for number in (*range(stages, len(ranks)), *range(stages)):
        on_stage(number, len(ranks))
        with as_rank(parsed, ranks[number]) as rank:
            if rank.engine.own is not None:
                (entry,) = rank.chunks[0].encoders
                trains[entry.name][rank.stage] = rank.chunks[0].trains(entry)
            states = rank_state(rank.chunks, args, stepping=stepping)
            step = EstimatedStep(
                rank,
                parsed,
                steps[number],
                states=states,
                traced=traced,
                trains=trains,
            )
            found[number] = _fullest(rank, step, states=states)
    in_order = [found[number] for number in range(len(ranks))]
    if args.target_device == "cpu":
        return in_order
    counted = communicators_of(args, model)
    return [replace(each, communicators=counted[each.rank].total) for each in in_order]


def _fullest(
    rank: EstimatedRank, step: EstimatedStep, *, states: Mapping[str, State]
) -> RankMemory:
    """Of the ranks of a tensor parallel group: they differ in the units that they encode."""
    state = sum(states.values(), State())
    kept = state.by_name()
    found = []
    for member in dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()):
        tape = Tape(region=TRANSIENT)
        for name, nbytes in kept.items():
            tape.add(name, nbytes)
        tape.sample()
        step.follow(tape, rank=member)
        assert tape.total == sum(kept.values()), f"nobody let go of {tape.live}"
        tape.doing = "optimizer step"
        tape.work(state.step)
        found.append(
            RankMemory(
                stage=rank.stage,
                rank=member,
                role=step.role,
                parts={name: nbytes for name, nbytes in tape.peak.items() if nbytes},
                when=tape.when,
                most={name: nbytes for name, nbytes in tape.highest.items() if nbytes},
                step=tape.total + state.step,
                host=step.host,
            )
        )
    return max(found, key=lambda each: each.total)
