"""Rows whose tokens lie on several ranks."""

from argparse import Namespace
from math import lcm
from typing import Any, get_args

from loongplug.models.layers.context.attention import CommType
from loongplug.training.rules.rule import Problems, number, rule

_RANKS = number("--context-parallel-size", above=1)


@rule(
    reason="each rank holds equally many tokens of a row, half of them from its front with context "
    "parallelism",
    cure="give a multiple",
)
def row_parts(args: Namespace, model: Any) -> Problems:
    """`--seq-length` that is no multiple of twice the context parallel ranks, or of tp with
    `--sequence-parallel`, or of both together
    """
    cp, length = args.context_parallel_size, args.seq_length
    tp = args.tensor_model_parallel_size if args.sequence_parallel else 1
    of = tp if cp < 2 else lcm(2, tp) * cp
    if tp > 0 and length is not None and length % of:
        yield f"--seq-length {length} is no multiple of {of} with cp {cp} and {tp} sequence shards"


@rule(
    reason="a part of a row has these ways to come by keys and values, and a2a gives each rank "
    "whole key/value heads",
    cure="drop --cp-comm-type, which means all_gather",
)
def context_parallel_communication(args: Namespace, model: Any) -> Problems:
    """`--cp-comm-type` other than one of `all_gather`, `a2a` and `p2p`, or `a2a` where the context
    parallel ranks do not divide the key/value heads of a tensor parallel rank
    """
    cp, tp, given = args.context_parallel_size, args.tensor_model_parallel_size, args.cp_comm_type
    if cp < 2:
        return
    if len(given) != 1 or given[0] not in get_args(CommType):
        yield f"--cp-comm-type {' '.join(given)}"
    elif given == ["a2a"] and tp > 0 and (heads := args.num_query_groups // tp) % cp:
        yield f"--cp-comm-type a2a with cp {cp} and {heads} key/value heads on a rank"


@rule(
    reason="it goes by the samples of a pack, rows of one sample give zigzag's ranks equal work, "
    "and p2p takes steps in which each pair of ranks should have equal work",
    cure="drop --cp-balance",
)
def context_parallel_balance(args: Namespace, model: Any) -> Problems:
    """`--cp-balance lpt` without `--packing`, or with `--cp-comm-type p2p`"""
    if args.context_parallel_size < 2 or args.cp_balance != "lpt":
        return
    if not args.packing:
        yield "--cp-balance lpt without --packing"
    elif args.cp_comm_type == ["p2p"]:
        yield "--cp-balance lpt with --cp-comm-type p2p"


@rule(
    reason="ranks of a row draw the same random numbers, and would drop the same of their parts; "
    "an encoder's adapters may drop, since these ranks then drop the same of the same media",
    cure="give 0, which is the default",
)
def context_parallel_dropout(args: Namespace, model: Any) -> Problems:
    """`--attention-dropout`, `--hidden-dropout` or `model.foundation.lora.dropout` above 0 with
    `--context-parallel-size` above 1
    """
    lora = model.foundation.lora
    rates = {
        "--attention-dropout": args.attention_dropout,
        "--hidden-dropout": args.hidden_dropout,
        "model.foundation.lora.dropout": 0 if lora is None else lora.dropout,
    }
    for name, rate in rates.items():
        if rate > 0 and args.context_parallel_size > 1:
            yield f"{name} {rate:g} with {_RANKS.said(args)}"
