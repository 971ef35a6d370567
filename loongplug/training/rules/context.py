"""Rows whose tokens lie on several ranks."""

from argparse import Namespace
from math import lcm
from typing import Any, get_args

from loongplug.models.layers.context.attention import CommType
from loongplug.training.rules.rule import Choice, any_of, excludes, flag, rule

_RANKS = Choice(
    said=lambda args: (
        f"--context-parallel-size {args.context_parallel_size}"
        if args.context_parallel_size > 1
        else ""
    ),
    in_docs="`--context-parallel-size` above 1",
)


context_parallel_parts = excludes(
    _RANKS,
    any_of(
        flag("--hybrid-context-parallel"),
        flag("--hierarchical-context-parallel-sizes"),
        in_docs="`--hybrid-context-parallel`, `--hierarchical-context-parallel-sizes`",
    ),
    reason="these split rows in ways of their own",
    cure="drop one of them",
)


@rule(
    reason="each rank holds equally many tokens of a row, half of them from its front, and with "
    "sequence parallelism these are split once more",
    cure="give a multiple",
)
def context_parallel_length(args: Namespace, model: Any) -> str | None:
    """`--seq-length` that is no multiple of twice the context parallel ranks, or, with
    `--sequence-parallel`, of these times tp
    """
    cp, length = args.context_parallel_size, args.seq_length
    tp = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if cp < 2 or tp < 1 or length is None:
        return None
    of = lcm(2, tp) * cp
    return f"--seq-length {length} is no multiple of {of} with cp {cp}" if length % of else None


@rule(
    reason="a part of a row has these ways to come by keys and values, and a2a gives each rank "
    "whole key/value heads",
    cure="drop --cp-comm-type, which means all_gather",
)
def context_parallel_communication(args: Namespace, model: Any) -> str | None:
    """`--cp-comm-type` other than one of `all_gather`, `a2a` and `p2p`, or `a2a` where the context
    parallel ranks do not divide the key/value heads of a tensor parallel rank
    """
    cp, tp, given = args.context_parallel_size, args.tensor_model_parallel_size, args.cp_comm_type
    if cp < 2:
        return None
    if len(given) != 1 or given[0] not in get_args(CommType):
        return f"--cp-comm-type {' '.join(given)}"
    groups = args.num_query_groups
    if given == ["a2a"] and tp > 0 and (groups // tp) % cp:
        return f"--cp-comm-type a2a with cp {cp} and {groups // tp} key/value heads on a rank"
    return None


@rule(
    reason="it goes by the samples of a pack, rows of one sample give zigzag's ranks equal work, "
    "and p2p takes steps in which each pair of ranks should have equal work",
    cure="drop --cp-balance",
)
def context_parallel_balance(args: Namespace, model: Any) -> str | None:
    """`--cp-balance lpt` without `--packing`, or with `--cp-comm-type p2p`"""
    if args.context_parallel_size < 2 or args.cp_balance != "lpt":
        return None
    if not args.packing:
        return "--cp-balance lpt without --packing"
    if args.cp_comm_type == ["p2p"]:
        return "--cp-balance lpt with --cp-comm-type p2p"
    return None


@rule(
    reason="attention over parts of a row drops nothing, and ranks of a row would drop the same "
    "of their parts",
    cure="give 0, which is the default",
)
def context_parallel_dropout(args: Namespace, model: Any) -> str | None:
    """`--attention-dropout` or `--hidden-dropout` above 0 with `--context-parallel-size` above 1"""
    given = _RANKS.said(args)
    rates = {name: getattr(args, name) for name in ("attention_dropout", "hidden_dropout")}
    above = [f"--{name.replace('_', '-')} {rate}" for name, rate in rates.items() if rate]
    return f"{' and '.join(above)} with {given}" if given and above else None


@rule(
    reason="ranks of a row draw the same random numbers, and would drop the same of their parts; "
    "an encoder's adapters may drop, since these ranks then drop the same of the same media",
    cure="give 0, which is the default",
)
def context_parallel_adapters(args: Namespace, model: Any) -> str | None:
    """`model.foundation.lora.dropout` above 0 with `--context-parallel-size` above 1"""
    given, lora = _RANKS.said(args), model.foundation.lora
    if not given or lora is None or lora.dropout <= 0:
        return None
    return f"model.foundation.lora.dropout {lora.dropout:g} with {given}"
