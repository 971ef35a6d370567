"""Full separation, one encoder of which works in the pipeline's bubbles.

Where one of these rules stands against a run, ``--full-hetero-dp-schedule auto`` does without.
"""

import os
from argparse import Namespace
from typing import Any

from loongplug.hetero.modes import mode_of, modes_of
from loongplug.training.rules import communicators
from loongplug.training.rules.hetero import STREAMED, encoder_tp
from loongplug.training.rules.layout import wants_virtual
from loongplug.training.rules.rule import (
    Choice,
    Problems,
    any_of,
    encoders_of,
    excludes,
    flag,
    rule,
)

_SEPARATED = "use --full-hetero-dp-schedule separated"


streamed_offload = excludes(
    STREAMED,
    any_of(flag("--full-hetero-dp-cpu-offload"), flag("--offload-encoder-state")),
    reason="the encoder works all through the decoder's schedule, so that its state cannot be "
    "away, and features set out as soon as they are made: what is on its way cannot leave",
    cure=f"drop the flag, or {_SEPARATED}",
)
streamed_overlap = excludes(
    STREAMED,
    any_of(
        flag("--overlap-moe-expert-parallel-comm"),
        flag("--overlap-p2p-communication-warmup-flush", argument="overlap_p2p_comm_warmup_flush"),
        Choice(
            said=lambda args: (
                "--no-overlap-p2p-communication with virtual stages"
                if not args.overlap_p2p_comm and wants_virtual(args)
                else ""
            ),
            in_docs="`--no-overlap-p2p-communication` and virtual stages",
        ),
    ),
    reason="a forward then runs or sends together with a backward, or a receive is posted late: "
    "there is no moment between two passes",
    cure=f"drop the flag, or {_SEPARATED}",
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
    if STREAMED.said(args) and others and len(others) < len(modes):
        yield f"{STREAMED.said(args)} with {', '.join(others)}"


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
            yield f"{STREAMED.said(args)} {with_tp}"


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
    if not STREAMED.said(args) or most is None or most.own > communicators.MOST:
        return
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a run sets it
    if not queues.isdigit() or int(queues) < most.messages:
        yield (
            f"{STREAMED.said(args)} with CUDA_DEVICE_MAX_CONNECTIONS={queues} and {most.messages} "
            "streams for messages on a rank"
        )
