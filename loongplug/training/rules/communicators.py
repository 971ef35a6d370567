"""How many communicators NCCL makes on each rank of a run, and how many there may be."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from loongplug.hetero.modes import modes_of
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
from loongplug.parallel.layout import Layout
from loongplug.training.rules.hetero import encoder_tp
from loongplug.training.rules.layout import wants_virtual
from loongplug.training.rules.rule import Problems, data_parallel_size, rule

MOST = 24  # of ours on a rank: torch has 32 streams, and behind the last hands out the first again


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """A rank's communicators: Megatron's groups, our all-to-alls, our messages of two ranks."""

    megatrons: int
    exchanges: int
    messages: int

    @property
    def own(self) -> int:
        """The number of ours."""
        return self.exchanges + self.messages

    @property
    def total(self) -> int:
        """The number of all, with Megatron's."""
        return self.megatrons + self.own


def communicators_of(args: Namespace, model: Any) -> dict[int, Communicators]:
    """Each rank's, from where modules lie. Raises ValueError for a layout that cannot be."""
    decoder = Layout(
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=data_parallel_size(args),
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or 0,
    )
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
