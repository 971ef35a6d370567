"""Layout: the world, tensor parallel ranks, stages, virtual ones, and ranks that share a row."""

from argparse import Namespace
from math import lcm
from typing import Any, get_args

from loongplug.models.layers.context.attention import CommType
from loongplug.training.rules import hetero, hyperparameters
from loongplug.training.rules.rule import (
    Problems,
    data_parallel_size,
    evaluates,
    indivisible,
    model_parallel_size,
    number,
    rule,
    value_of,
)
from loongplug.training.step_sizes import eval_sizes


@rule(
    reason="each model replica takes that many ranks",
    cure="change the number of processes, or the parallel sizes",
)
def world_size(args: Namespace, model: Any) -> Problems:
    """the number of ranks is not a multiple of tp x pp x cp"""
    layout = model_parallel_size(args)
    if layout < 1 or args.world_size % layout == 0 or hetero.own_ranks_world(args, model):
        return
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    sizes = f"tp {tp} x pp {pp} x cp {args.context_parallel_size} = {layout}"
    yield f"{args.world_size} ranks do not divide by {sizes}"


@rule(
    reason="each rank holds whole groups of heads and equal slices of layers and of the embedding, "
    "and padding that would change the checkpoint",
    cure="choose another --tensor-model-parallel-size, or raise model.foundation.vocab_size",
)
def tensor_parallel_sizes(args: Namespace, model: Any) -> Problems:
    """decoder heads, query groups (key and value heads), an `ffn_hidden_size`, a
    `shared_expert_ffn_hidden_size` or a `vocab_size` that tp does not divide
    """
    sizes = {
        "the decoder's num_attention_heads": args.num_attention_heads,
        "the decoder's num_query_groups": args.num_query_groups,
        "vocab_size": args.padded_vocab_size,
    }
    if not args.num_experts:
        sizes["the decoder's ffn_hidden_size"] = args.ffn_hidden_size
    elif args.moe_shared_expert_intermediate_size is not None:
        sizes["shared_expert_ffn_hidden_size"] = args.moe_shared_expert_intermediate_size
    return indivisible(sizes, by="tp", ranks=args.tensor_model_parallel_size)


# How layers are split where stages are not equal.
_UNEVEN = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    "--pipeline-model-parallel-layout",
)


@rule(
    reason="each rank holds as many experts and an equal slice of each, each virtual stage as many "
    "layers, and the weight of a single expert teaches the router nothing",
    cure="change the number of processes, that size, or model.foundation",
)
def equal_parts(args: Namespace, model: Any) -> Problems:
    """a number of ranks that expert tp x ep x pp does not divide, `num_experts` that ep does not,
    an `expert_ffn_hidden_size` that expert tp does not, a stage's layers that its virtual stages do
    not; `experts_per_token` below 2 or above `num_experts`; expert tp above tp for a dense model
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    etp, ep = args.expert_tensor_parallel_size or tp, args.expert_model_parallel_size
    if args.num_experts:
        sizes = f"expert tp {etp} x ep {ep} x pp {pp} ="
        yield from indivisible({"the world": args.world_size}, by=sizes, ranks=etp * ep * pp)
        yield from indivisible({"num_experts": args.num_experts}, by="ep", ranks=ep)
        width = {"expert_ffn_hidden_size": args.moe_ffn_hidden_size}
        yield from indivisible(width, by="expert tp", ranks=etp)
        if not 2 <= args.moe_router_topk <= args.num_experts:
            yield f"experts_per_token {args.moe_router_topk} of {args.num_experts} experts"
    elif etp not in (1, tp):
        yield f"--expert-tensor-parallel-size {etp} for a dense model"
    virtual = args.num_virtual_stages_per_pipeline_rank
    each = virtual or args.num_layers_per_virtual_pipeline_stage
    if pp > 1 and each and not args.num_layers % pp and not any(value_of(args, f) for f in _UNEVEN):
        by = "virtual stages" if virtual else "layers of a virtual stage"
        yield from indivisible({"a stage's layers": args.num_layers // pp}, by=by, ranks=each)


@rule(
    reason="the schedule runs them in groups of pp",
    cure="make the number of microbatches a multiple of pp",
    training_only=True,
)
def virtual_microbatches(args: Namespace, model: Any) -> Problems:
    """virtual stages with microbatches that do not fill the interleaved schedule"""
    pp, each = args.pipeline_model_parallel_size, args.micro_batch_size
    dp = data_parallel_size(args)
    if pp < 2 or not wants_virtual(args) or not dp or not each:
        return
    if hyperparameters.global_batch(args, model) is not None:
        return
    sizes, steps = hyperparameters.known_sizes(args), [1]
    if sizes is not None:
        steps = [size // (each * dp) or 1 for _, size in sizes.sizes]
        batch, of_batch = eval_sizes(args, dp=dp) if evaluates(args) else (None, None)
        steps += [batch // of_batch] if batch and of_batch else []
    group = args.microbatch_group_size_per_vp_stage or pp
    for microbatches in steps:
        left = microbatches % group
        if not (pp <= group <= microbatches and (left == 0 or left >= pp)):
            yield (
                f"{microbatches} microbatches a step do not fill the interleaved schedule of pp "
                f"{pp} in groups of {group}"
            )
            return


def wants_virtual(args: Namespace) -> bool:
    """Whether flags ask for more than one virtual stage on each rank."""
    if args.pipeline_model_parallel_layout:
        return stages_of_layout(args) > args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    return virtual > 1 or args.num_layers_per_virtual_pipeline_stage is not None


def stages_of_layout(args: Namespace) -> int:
    """The number of stages, virtual ones too, of the layout that the flags have."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = args.pipeline_model_parallel_layout
    return len(PipelineParallelLayerLayout.parse_str_to_list(layout))


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
    reason="a part of a row has these ways to come by keys and values, a2a gives each rank whole "
    "key/value heads, and lpt goes by the samples of a pack and gives p2p's steps unequal work",
    cure="drop --cp-comm-type, which means all_gather, or --cp-balance",
)
def context_parallel_communication(args: Namespace, model: Any) -> Problems:
    """`--cp-comm-type` other than one of `all_gather`, `a2a` and `p2p`, or `a2a` where the context
    parallel ranks do not divide the key/value heads of a tensor parallel rank; `--cp-balance lpt`
    without `--packing`, or with `p2p`
    """
    cp, tp, given = args.context_parallel_size, args.tensor_model_parallel_size, args.cp_comm_type
    if cp < 2:
        return
    if len(given) != 1 or given[0] not in get_args(CommType):
        yield f"--cp-comm-type {' '.join(given)}"
    elif given == ["a2a"] and tp > 0 and (heads := args.num_query_groups // tp) % cp:
        yield f"--cp-comm-type a2a with cp {cp} and {heads} key/value heads on a rank"
    elif args.cp_balance == "lpt" and not args.packing:
        yield "--cp-balance lpt without --packing"
    elif args.cp_balance == "lpt" and given == ["p2p"]:
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
