"""A pipeline stage's passes within a step, and how many it does ahead of gradients. Pure.

Modules on ranks of their own are pipelines that lead into one another and at last into the decoder.
Each rank runs Megatron's 1F1B: some forwards to warm up, then a forward and a backward in turn,
then the backwards that are left. With as many warm-up forwards as stages lie between it and the
decoder's last one, no rank waits for a gradient that its own next output is needed for, as long as
nobody waits for a send between modules (figure 4(a) and appendix D of the MIMO paper; upstream
counts from the sources instead, which is too many where encoders are not equally deep).
"""

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


def ahead(*, pipeline: int, virtual: bool, group: int | None = None) -> int:
    """Forwards of the decoder's first chunk before its first backward.

    ``pipeline`` is the decoder's pipeline parallel size. ``virtual``: its ranks hold several
    chunks each, and Megatron's interleaved schedule runs ``group`` microbatches of a chunk before
    it goes on to the next; None for its default, as many as stages. More chunks or the overlap of
    MoE communication change nothing, and a ``group`` of more can need less than this.
    """
    assert pipeline > 0, pipeline
    if not virtual or pipeline == 1:
        return pipeline
    return 2 * (group or pipeline)


def warmup(*, ahead: int, stages: int, stage: int) -> int:
    """How many forwards an encoder's ``stage``, of ``stages``, does before its first backward.

    ``ahead`` is what comes behind the last of them (:func:`ahead`). Where the decoder runs plain
    1F1B, this is the distance to its last stage; a short step has fewer. One more is what the stage
    can have sent that nobody has taken yet: where gradients come back to it, the one of the
    microbatch so many before is here before each forward, and where none do, nothing else holds the
    stage back, and so it keeps no more than a stage that trains.
    """
    assert 0 <= stage < stages, (stage, stages)
    return ahead + stages - 1 - stage
