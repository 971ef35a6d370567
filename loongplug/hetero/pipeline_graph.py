"""How far ahead of the decoder the stages of modules on ranks of their own work. Pure.

Modules are pipelines that lead into one another and at last into the decoder. Each rank runs
Megatron's 1F1B: some forwards to warm up, then a forward and a backward in turn, then the
backwards that are left. With as many warm-up forwards as stages lie between it and the decoder's
last one, no rank waits for a gradient that its own next output is needed for, as long as nobody
waits for a send between modules (figure 4(a) and appendix D of the MIMO paper; upstream counts
from the sources instead, which is too many where encoders are not equally deep).
"""


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


def warmup(*, microbatches: int, ahead: int, stages: int, stage: int) -> int:
    """How many forwards an encoder's ``stage``, of ``stages``, does before its first backward.

    ``ahead`` is what comes behind the last of them (:func:`ahead`). Where the decoder runs plain
    1F1B, this is the distance to its last stage, or all of a short step.
    """
    assert 0 <= stage < stages, (stage, stages)
    return min(microbatches, ahead + stages - 1 - stage)


def in_flight(*, ahead: int, stages: int, stage: int) -> int:
    """How many microbatches an encoder's ``stage`` can have sent that nobody has taken yet.

    One more than its longest warm-up (:func:`warmup`). Where gradients come back to it, nothing
    ever waits for that: before each forward, the gradient of the microbatch so many before is here.
    Where none do, nothing else holds the stage back, and so it keeps no more than a stage that
    trains.
    """
    return ahead + stages - stage
