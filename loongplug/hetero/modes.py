"""The modes by name: the one place that knows which flags mean which strategies."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from loongplug.hetero.balance import THRESHOLD, Balance, EncoderWork
from loongplug.hetero.group_ahead import GroupAhead
from loongplug.hetero.placement import Placement, all_ranks_dp, first_stage_dp, first_stage_tp
from loongplug.hetero.three_phases import ThreePhases
from loongplug.hetero.timing import Timing
from loongplug.models.architecture import VisionArchitecture


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The strategies of a run.

    ``place`` is called with the decoder's layout, the encoder's entry and its ``tp``; ``timing``
    makes what is put around the decoder's schedule, None where each forward encodes its own unit.
    ``encoder_tp`` is the encoder's tensor parallel size where its YAML gives none; None stands
    for the decoder's. With ``any_owner``, every replica may encode any units of a step, and as
    many as it likes. With ``offload_state``, the encoder's parameters, gradients and optimizer
    state are on the host while the decoder works.
    """

    name: str
    place: Callable[..., Placement]
    timing: Callable[..., Timing] | None = None
    encoder_tp: int | None = None
    any_owner: bool = False
    offload_state: bool = False

    @property
    def on_every_stage(self) -> bool:
        """Whether the encoder lies on all of the decoder's stages."""
        return self.place is all_ranks_dp


UNIFORM = Mode(name="uniform", place=first_stage_tp)
ENCODER_HETERO_DP = Mode(
    name="heterogeneous DP", place=first_stage_dp, timing=GroupAhead, encoder_tp=1
)
FULL_HETERO_DP = Mode(
    name="full separation",
    place=all_ranks_dp,
    timing=ThreePhases,
    encoder_tp=1,
    any_owner=True,
)


def mode_of(args: Namespace) -> Mode:
    """What the flags ask for. Heterogeneous TP is the uniform mode with another encoder size."""
    if args.enable_full_hetero_dp:
        return _with_offload(FULL_HETERO_DP, args)
    if args.enable_encoder_hetero_dp:
        return ENCODER_HETERO_DP
    return UNIFORM


def _with_offload(mode: Mode, args: Namespace) -> Mode:
    features, activations = args.full_hetero_dp_cpu_offload, args.offload_encoder_activations
    if features or activations:
        timing = partial(ThreePhases, features_on_host=features, activations_on_host=activations)
        mode = replace(mode, timing=timing)
    return replace(mode, offload_state=True) if args.offload_encoder_state else mode


def balance_of(args: Namespace, encoder: VisionArchitecture) -> Balance | None:
    """How units are assigned by cost; None where they are in turn."""
    if not args.use_vit_dp_balance:
        return None
    threshold = args.dp_balance_trigger_threshold_vit
    return Balance(
        work=EncoderWork.of(encoder), threshold=THRESHOLD if threshold is None else threshold
    )
