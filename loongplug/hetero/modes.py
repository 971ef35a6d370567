"""The modes by name: the one place that knows which flags mean which strategies."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from loongplug.hetero.group_ahead import GroupAhead
from loongplug.hetero.placement import Placement, in_turn, on_all_ranks, together
from loongplug.hetero.three_phases import ThreePhases
from loongplug.hetero.timing import Timing


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The strategies of a run.

    ``place`` is called with the decoder's layout, the encoder's ``tp`` and the rank; ``timing``
    makes what is put around the decoder's schedule, None where each forward encodes its own unit.
    ``encoder_tp`` is the encoder's tensor parallel size where its YAML gives none; None stands
    for the decoder's.
    """

    name: str
    place: Callable[..., Placement]
    timing: Callable[..., Timing] | None = None
    encoder_tp: int | None = None


UNIFORM = Mode(name="uniform", place=together)
ENCODER_HETERO_DP = Mode(name="heterogeneous DP", place=in_turn, timing=GroupAhead, encoder_tp=1)
FULL_HETERO_DP = Mode(name="full separation", place=on_all_ranks, timing=ThreePhases, encoder_tp=1)


def mode_of(args: Namespace) -> Mode:
    """What the flags ask for. Heterogeneous TP is the uniform mode with another encoder size."""
    if args.enable_full_hetero_dp:
        return FULL_HETERO_DP
    if args.enable_encoder_hetero_dp:
        return ENCODER_HETERO_DP
    return UNIFORM
