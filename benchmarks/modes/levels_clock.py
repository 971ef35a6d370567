"""How long a traced step of a level should have taken, by the one clock. Pure.

Each pass takes what the passes of its rank took on the mean, and nothing that is sent takes time:
what differs from the trace is in which order ranks work, and who waits for whom.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from loongplug.partition.clock import StageTime
from modes.levels_work import (
    APART,
    FULL,
    HETERO_DP,
    HETERO_TP,
    STREAMED,
    TUNED,
    UNIFORM,
    Setting,
)
from modes.pipeline_clock import predicted
from modes.pipeline_work import Case, PacedEncoder

_MODES: Final = {
    UNIFORM: "uniform",
    TUNED: "uniform",
    HETERO_TP: "uniform",
    HETERO_DP: "encoder_hetero_dp",
    FULL: "full_hetero_dp",
    STREAMED: "streamed",
    APART: "own_ranks",
}
_BESIDE: Final = ("data", "optimizer")  # what each rank does before the schedule, and behind it


def clock_ms(
    level: str,
    setting: Setting,
    phase_ms: Sequence[Mapping[str, float]],
    *,
    microbatches: int,
) -> float:
    """Of a step without data parallelism, from what each rank's phases took."""
    assert setting.dp == 1, setting

    def each(ranks: Sequence[int], module: str) -> StageTime:
        """Of a microbatch, all these ranks together."""
        forward, backward = (
            sum(phase_ms[rank][f"{module} {way}"] for rank in ranks) / microbatches
            for way in ("forward", "backward")
        )
        return StageTime(forward=forward, backward=backward)

    everyone = range(setting.ranks)
    stages = [everyone[at : at + setting.tp] for at in range(0, setting.ranks, setting.tp)]
    if level == APART:
        stages = stages[:1]
    tp = setting.tp
    decoded = [each(ranks, "decoder") for ranks in stages]
    encoded = each(everyone, "encoder")
    if level == HETERO_TP:  # each rank encodes all
        encoded = StageTime(forward=encoded.forward / tp, backward=encoded.backward / tp)
    case = Case(
        mode=_MODES[level],
        stages=tuple(StageTime(forward=x.forward / tp, backward=x.backward / tp) for x in decoded),
        encoders=(
            PacedEncoder(name="encoder", time=encoded, tp=1 if level == HETERO_TP else None),
        ),
        microbatches=microbatches,
        tp=tp,
    )
    beside = max(sum(phase_ms[rank][phase] for phase in _BESIDE) for rank in everyone)
    return predicted(case) + beside
