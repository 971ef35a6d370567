"""A pipeline stage's passes within a step. Pure."""

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where a stage stands; ``group`` is how many microbatches each chunk takes in turn.

    With ``overlaps`` one microbatch's forward runs together with another's backward.
    """

    stages: int
    stage: int
    chunks: int
    group: int
    overlaps: bool = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A microbatch's way through one of the rank's chunks, forward or backward."""

    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a stage does at a time: a forward, a backward, or both together."""

    forward: Pass | None = None
    backward: Pass | None = None

    @property
    def name(self) -> str:
        """In words."""
        there = (("forward", self.forward), ("backward", self.backward))
        return " with ".join(name for name, each in there if each is not None)


def first_stage(args: Namespace) -> Pipeline:
    """The decoder's, in a run with these checked flags."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    return Pipeline(
        stages=stages,
        stage=0,
        chunks=chunks or 1,
        group=(args.microbatch_group_size_per_vp_stage if chunks else None) or stages,
        overlaps=args.overlap_moe_expert_parallel_comm,
    )
