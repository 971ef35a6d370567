"""Encoders in the pipeline's bubbles, and how many communicators NCCL makes on a rank.

Where one of these rules stands against a run, ``--full-hetero-dp-schedule auto`` does without.
"""

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from loongplug.hetero.modes import mode_of, modes_of
from loongplug.hetero.placement import (
    Pair,
    apart_pairs,
    count,
    megatrons,
    piece_pairs,
    pipeline_pairs,
    stage_pairs,
    there_and_back,
)
from loongplug.models.entries import encoders
from loongplug.training.rules.hetero import STREAMED, encoder_tp
from loongplug.training.rules.layout import wants_virtual
from loongplug.training.rules.rule import (
    Choice,
    Problems,
    any_of,
    decoder_layout_of,
    encoders_of,
    excludes,
    flag,
    rule,
)

MOST = 24  # of ours on a rank: torch has 32 streams, and behind the last hands out the first again


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """A rank's communicators: Megatron's groups, our all-to-alls, our messages of two ranks."""

    megatrons: int
    exchanges: int
    messages: int

    @property
    def own(self) -> int:
        return self.exchanges + self.messages

    @property
    def total(self) -> int:
        return self.megatrons + self.own


def communicators_of(args: Namespace, model: Any) -> dict[int, Communicators]:
    """Each rank's, from where modules lie. Raises ValueError for a layout that cannot be."""
    decoder = decoder_layout_of(args)
    shared = megatrons(decoder, experts=bool(args.num_experts))
    of_megatron = Counter(dict.fromkeys(decoder.ranks, shared))
    exchanges: Counter[int] = Counter()
    messages: list[Iterable[Pair]] = []  # by group
    modes = modes_of(args, model)
    for entry in encoders(model.entries()):
        encoder, name = model.encoder(entry.name), entry.name
        mode = modes[name]
        placement = mode.place(decoder, entry=entry, tp=encoder_tp(args, encoder))
        layout = placement.entry(name).layout
        if mode.apart or (layout.tp, layout.dp) != (decoder.tp, decoder.dp):
            of_megatron.update(dict.fromkeys(layout.ranks, megatrons(layout, experts=False)))
        if mode.apart:
            sizes = args.micro_batch_size, args.eval_micro_batch_size or args.micro_batch_size
            pieces = chain(*(placement.pieces(name, micro_batch_size=each) for each in sizes))
            messages += there_and_back(apart_pairs(pieces, cp=decoder.cp))
            messages += there_and_back(stage_pairs(layout))
        elif mode.around_schedule:
            exchanges.update(chain(*(each.ranks for each in placement.edges(name))))
        if mode.fills_bubbles and decoder.pp > 1:
            messages += there_and_back(piece_pairs(placement.edges(name), cp=decoder.cp))
            if decoder.cp > 1:  # in one more of Megatron's groups the first stage deals
                of_megatron.update(chain(*decoder.stage(0)))
            pipelines = decoder.groups("pp")
            pairs = [pipeline_pairs(each, virtual=wants_virtual(args)) for each in pipelines]
            messages += chain(*(each.values() for each in pairs))
    sent = count(messages)
    return {
        rank: Communicators(
            megatrons=1 + of_megatron[rank],  # one is over the world
            exchanges=exchanges[rank],
            messages=sent[rank],
        )
        for rank in of_megatron
    }


def most_of_a_rank(args: Namespace, model: Any) -> Communicators | None:
    """Those of the rank with most of ours on CUDA; None elsewhere, or if a layout cannot be."""
    if args.target_device != "cuda" or args.micro_batch_size is None:
        return None
    try:
        found = communicators_of(args, model)
    except ValueError:
        return None
    return max(found.values(), key=lambda each: each.own)


@rule(
    reason="torch has 32 CUDA streams for them, and two that share one may wait for each other for "
    "ever",
    cure="use --full-hetero-dp-schedule separated, or give encoders on ranks of their own more "
    "replicas (their data_parallel_size)",
)
def communicators(args: Namespace, model: Any) -> Problems:
    """on CUDA, more than 24 communicators for exchanges of features and messages on a rank"""
    most = most_of_a_rank(args, model)
    if most is not None and most.own > MOST:
        yield f"{most.own} communicators of NCCL on a rank"


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
    most = most_of_a_rank(args, model)
    if not STREAMED.said(args) or most is None or most.own > MOST:
        return
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a run sets it
    if not queues.isdigit() or int(queues) < most.messages:
        yield (
            f"{STREAMED.said(args)} with CUDA_DEVICE_MAX_CONNECTIONS={queues} and {most.messages} "
            "streams for messages on a rank"
        )
