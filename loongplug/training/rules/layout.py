"""The world, and how the decoder is split: tensor parallel ranks, pipeline stages, virtual ones."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import hyperparameters, own_ranks
from loongplug.training.rules.rule import (
    Problems,
    data_parallel_size,
    evaluates,
    indivisible,
    model_parallel_size,
    rule,
)
from loongplug.training.step_sizes import eval_sizes


@rule(
    reason="each model replica takes that many ranks",
    cure="change the number of processes, or the parallel sizes",
)
def world_size(args: Namespace, model: Any) -> Problems:
    """the number of ranks is not a multiple of tp x pp x cp"""
    layout = model_parallel_size(args)
    if layout < 1 or args.world_size % layout == 0:
        return
    if own_ranks.own_ranks_world(args, model) is None:
        yield (
            f"{args.world_size} ranks do not divide by "
            f"tp {args.tensor_model_parallel_size} x pp {args.pipeline_model_parallel_size} x "
            f"cp {args.context_parallel_size} = {layout}"
        )


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
