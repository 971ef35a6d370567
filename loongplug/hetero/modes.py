"""The modes by name: the one place that knows which flags mean which strategies."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loongplug.hetero.balance import THRESHOLD, Balance
from loongplug.hetero.operations import Kept
from loongplug.hetero.placement import (
    Placement,
    all_ranks_dp,
    first_stage_dp,
    first_stage_tp,
    one_apart,
)
from loongplug.hetero.policies import Policy, apart, group_ahead, inline, separated, streamed
from loongplug.models.amounts import macs_for_a_token
from loongplug.models.architecture import EncoderArchitecture


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The strategies of a run.

    ``place`` is called with the decoder's layout, the encoder's entry and its ``tp``; ``policy``
    says when units are encoded. With ``around_schedule`` its operations are done around and within
    Megatron's schedule, by an executor; else the decoder's forward does all there is. With
    ``outside_schedule`` Megatron's schedule has nothing to gather or to reduce for encoders. With
    ``fills_bubbles`` they may work between its passes in training. ``encoder_tp`` is the encoder's
    tensor parallel size where its YAML gives none; None stands for the decoder's. ``on_host`` is
    what is there while the decoder works.
    """

    name: str
    place: Callable[..., Placement]
    policy: Policy
    around_schedule: bool = True
    outside_schedule: bool = False
    encoder_tp: int | None = 1
    apart: bool = False
    fills_bubbles: bool = False
    on_host: frozenset[Kept] = frozenset()

    @property
    def on_every_stage(self) -> bool:
        """Whether the encoder lies on all of the decoder's stages."""
        return self.place is all_ranks_dp


UNIFORM = Mode(
    name="uniform", place=first_stage_tp, policy=inline, around_schedule=False, encoder_tp=None
)
ENCODER_HETERO_DP = Mode(name="heterogeneous DP", place=first_stage_dp, policy=group_ahead)
FULL_HETERO_DP = Mode(
    name="full separation",
    place=all_ranks_dp,
    policy=separated,
    outside_schedule=True,
)
STREAMED = replace(
    FULL_HETERO_DP, name="streamed full separation", policy=streamed, fills_bubbles=True
)
APART = Mode(
    name="ranks of its own", place=one_apart, policy=apart, outside_schedule=True, apart=True
)
_OFFLOADS = {
    "full_hetero_dp_cpu_offload": Kept.FEATURES,
    "offload_encoder_activations": Kept.ACTIVATIONS,
    "offload_encoder_state": Kept.STATE,
}


# By the names that an encoder's YAML has for them.
NAMED = {
    "uniform": UNIFORM,
    "encoder_hetero_dp": ENCODER_HETERO_DP,
    "full_hetero_dp": FULL_HETERO_DP,
}
# Full separation, by its schedule.
SCHEDULED = {"streamed": STREAMED, "separated": FULL_HETERO_DP}
# What the schedule's flag may say; with the last, the run chooses among the others.
SCHEDULES = (*SCHEDULED, "auto")


def modes_of(args: Namespace, model: Any) -> dict[str, Mode]:
    """The modes of a model's encoders, by name.

    One streams at a time. Where several could, it is the one with most work for each token that it
    gives the text, by :func:`macs_for_a_token`; of equal ones the first. How many tokens each will
    give is in the data, and this has to be known at start, alike on every rank. The others are
    separated.
    """
    found = {name: mode_of(args, model.encoder(name)) for name in model.encoders}
    streaming = [name for name, mode in found.items() if mode.fills_bubbles]
    if len(streaming) > 1:
        most = max(streaming, key=lambda name: macs_for_a_token(model.encoder(name)))
        for name in streaming:
            if name != most:
                found[name] = replace(FULL_HETERO_DP, on_host=found[name].on_host)
    return found


def mode_of(args: Namespace, encoder: EncoderArchitecture | None = None) -> Mode:
    """The mode that the flags ask for, or the ``encoder``'s YAML, which stands above them.

    That is of an encoder that is alone; :func:`modes_of` says which one of several streams.
    Heterogeneous TP is the uniform mode with another encoder size.
    """
    if encoder is not None and encoder.rank_offset is not None:
        place = partial(
            one_apart,
            dp=encoder.data_parallel_size,
            pp=encoder.pipeline_model_parallel_size,
            rank_offset=encoder.rank_offset,
        )
        return replace(APART, place=place)
    if encoder is not None and encoder.mode is not None:
        found = NAMED.get(encoder.mode, UNIFORM)  # a rule refuses other names
    elif args.enable_full_hetero_dp:
        found = FULL_HETERO_DP
    elif args.enable_encoder_hetero_dp:
        found = ENCODER_HETERO_DP
    else:
        found = UNIFORM
    if found is FULL_HETERO_DP:
        found = SCHEDULED.get(args.full_hetero_dp_schedule, FULL_HETERO_DP)  # still open: the usual
    if not found.outside_schedule:  # nothing of it can be away in between
        return found
    on_host = frozenset(what for flag, what in _OFFLOADS.items() if getattr(args, flag))
    return replace(found, on_host=on_host)


def is_schedule_open(args: Namespace) -> bool:
    """Whether the flags leave it to the run when encoders work in full separation."""
    return args.full_hetero_dp_schedule not in SCHEDULED


def may_fill_bubbles(args: Namespace) -> bool:
    """Whether the flags let full separation fill bubbles, or leave that to the run."""
    return is_schedule_open(args) or SCHEDULED[args.full_hetero_dp_schedule].fills_bubbles


def settle_bubbles(args: Namespace, *, filled: bool) -> None:
    """Say in ``args`` whether full separation fills bubbles."""
    (args.full_hetero_dp_schedule,) = (
        name for name, mode in SCHEDULED.items() if mode.fills_bubbles == filled
    )


def balance_of(args: Namespace, encoder: EncoderArchitecture) -> Balance:
    """How units are assigned by cost, where they are not in turn."""
    threshold = args.dp_balance_trigger_threshold_vit
    return Balance.of(encoder, threshold=THRESHOLD if threshold is None else threshold)
