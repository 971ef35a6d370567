"""Full separation, one encoder of which works in the pipeline's bubbles.

Where one of these rules stands against a run, ``--full-hetero-dp-schedule auto`` does without.
"""

import os
from argparse import Namespace
from typing import Any

from loongplug.hetero.modes import may_fill_bubbles, mode_of, modes_of
from loongplug.training.rules import communicators
from loongplug.training.rules.hetero import encoder_tp, full_separation
from loongplug.training.rules.layout import wants_virtual
from loongplug.training.rules.rule import (
    Choice,
    Problems,
    any_of,
    encoders_of,
    excludes,
    flag,
    rule,
    value_of,
)

_STREAMED = flag("--full-hetero-dp-schedule streamed")
_SEPARATED = "use --full-hetero-dp-schedule separated"


@rule(
    refuses="`--full-hetero-dp-schedule streamed` without full separation of an encoder",
    reason="elsewhere encoders work within the decoder's forward, or have ranks of their own",
    cure="add --enable-full-hetero-dp, or drop the flag",
)
def streamed_mode(args: Namespace, model: Any) -> Problems:
    if _STREAMED.said(args) and not full_separation(args, model):
        yield _STREAMED.said(args)


@rule(
    reason="it says how long an encoder's operations take beside the decoder's, for streamed plans",
    cure="give more than 0 together with --enable-full-hetero-dp and without "
    "--full-hetero-dp-schedule separated, or drop it",
)
def streamed_speed(args: Namespace, model: Any) -> Problems:
    """`--full-hetero-dp-encoder-speed` of 0 or less, with `--full-hetero-dp-schedule separated`,
    or without full separation of an encoder
    """
    speed, schedule = args.full_hetero_dp_encoder_speed, "--full-hetero-dp-schedule"
    plans = may_fill_bubbles(args) and full_separation(args, model)
    if speed is not None and (speed <= 0 or not plans):
        with_schedule = f" with {schedule} {value_of(args, schedule)}" if speed > 0 else ""
        yield f"--full-hetero-dp-encoder-speed {speed}{with_schedule}"


streamed_offload = excludes(
    _STREAMED,
    any_of(flag("--full-hetero-dp-cpu-offload"), flag("--offload-encoder-state")),
    reason="the encoder works all through the decoder's schedule, so that its state cannot be "
    "away, and features set out as soon as they are made: what is on its way cannot leave",
    cure=f"drop the flag, or {_SEPARATED}",
)
streamed_overlap = excludes(
    _STREAMED,
    any_of(
        flag("--overlap-moe-expert-parallel-comm"),
        flag("--overlap-p2p-communication-warmup-flush", argument="overlap_p2p_comm_warmup_flush"),
    ),
    reason="a forward then runs together with a backward, or a receive is posted late: there is no "
    "moment between two passes",
    cure=f"drop the flag, or {_SEPARATED}",
)
streamed_virtual = excludes(
    _STREAMED,
    Choice(
        said=lambda args: (
            "--no-overlap-p2p-communication with virtual stages"
            if not args.overlap_p2p_comm and wants_virtual(args)
            else ""
        ),
        in_docs="`--no-overlap-p2p-communication` and virtual stages",
    ),
    reason="Megatron then sends what a forward and a backward have made at once, and an encoder "
    "that works before both may wait for the first",
    cure=f"drop --no-overlap-p2p-communication, or {_SEPARATED}",
)


@rule(
    reason="an encoder that streams works by a plan, and one in another mode works at times that "
    "this plan does not know",
    cure=f"give every encoder full separation, or {_SEPARATED}",
)
def streamed_encoders(args: Namespace, model: Any) -> Problems:
    """`--full-hetero-dp-schedule streamed` with an encoder in another mode beside one in full
    separation
    """
    modes = {key: mode_of(args, encoder) for key, encoder in encoders_of(model)}
    others = [f"{key}: {mode.name}" for key, mode in modes.items() if not mode.on_every_stage]
    if _STREAMED.said(args) and others and len(others) < len(modes):
        yield f"{_STREAMED.said(args)} with {', '.join(others)}"


@rule(
    reason="a replica over several stages would work only where all of these wait",
    cure=f"give it a tensor parallel size of at most the decoder's, or {_SEPARATED}",
)
def streamed_stages(args: Namespace, model: Any) -> Problems:
    """`--full-hetero-dp-schedule streamed` where the encoder that streams has a
    `tensor_model_parallel_size` above the decoder's
    """
    decoder = args.tensor_model_parallel_size
    for name, mode in modes_of(args, model).items():
        size = encoder_tp(args, model.encoder(name))
        if mode.fills_bubbles and size > decoder:
            with_tp = f"with {model.keys[name]}'s tp {size} over stages of tp {decoder}"
            yield f"{_STREAMED.said(args)} {with_tp}"


@rule(
    reason="a message that its receiver has not come to yet would hold up whatever the device is "
    "given behind it, and ranks would wait for each other for ever",
    cure="export CUDA_DEVICE_MAX_CONNECTIONS=32, which Megatron refuses with tensor or context "
    f"parallelism on GPUs below Blackwell, or {_SEPARATED}",
)
def streamed_queues(args: Namespace, model: Any) -> Problems:
    """`--full-hetero-dp-schedule streamed` on CUDA with fewer `CUDA_DEVICE_MAX_CONNECTIONS` (1
    where it is not set) than a rank has streams for messages
    """
    most = communicators.most_of_a_rank(args, model)
    if not _STREAMED.said(args) or most is None or most.own > communicators.MOST:
        return
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a run sets it
    if not queues.isdigit() or int(queues) < most.messages:
        yield (
            f"{_STREAMED.said(args)} with CUDA_DEVICE_MAX_CONNECTIONS={queues} and {most.messages} "
            "streams for messages on a rank"
        )
