"""The world, and the tensor parallel size of the decoder."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import own_ranks
from loongplug.training.rules.rule import indivisible, model_parallel_size, rule


@rule(
    reason="each model replica takes that many ranks",
    cure="change the number of processes, or the parallel sizes",
)
def world_size(args: Namespace, model: Any) -> str | None:
    """the number of ranks is not a multiple of tp x pp x cp"""
    layout = model_parallel_size(args)
    if layout < 1 or args.world_size % layout == 0:
        return None
    if own_ranks.own_ranks_world(args, model) is not None:
        return None
    whose = "the decoder's " if own_ranks.lying_apart(model) else ""
    return (
        f"{whose}{args.world_size} ranks do not divide by tp {args.tensor_model_parallel_size} x "
        f"pp {args.pipeline_model_parallel_size} x cp {args.context_parallel_size} = {layout}"
    )


@rule(
    reason="each rank of the group holds an equal slice of the sequence",
    cure="give a multiple of tp",
)
def sequence_parallel(args: Namespace, model: Any) -> str | None:
    """`--sequence-parallel` with a sequence length that tp does not divide"""
    if not args.sequence_parallel or args.seq_length is None:
        return None
    return indivisible("--seq-length", args.seq_length, args=args)


@rule(
    reason="each rank holds whole groups of heads",
    cure="choose another --tensor-model-parallel-size",
)
def decoder_heads(args: Namespace, model: Any) -> str | None:
    """decoder heads or query groups (key and value heads) that tp does not divide"""
    problems = (
        indivisible("the decoder's num_attention_heads", args.num_attention_heads, args=args),
        indivisible("the decoder's num_query_groups", args.num_query_groups, args=args),
    )
    return "; ".join(problem for problem in problems if problem) or None


@rule(reason="each rank holds an equal slice", cure="choose another --tensor-model-parallel-size")
def decoder_ffn(args: Namespace, model: Any) -> str | None:
    """a decoder `ffn_hidden_size` that tp does not divide"""
    if args.num_experts:  # no layer has that width
        return None
    return indivisible("the decoder's ffn_hidden_size", args.ffn_hidden_size, args=args)


@rule(
    reason="the embedding is sharded, and padding it would change the checkpoint",
    cure="choose another --tensor-model-parallel-size, or raise model.foundation.vocab_size",
)
def vocabulary(args: Namespace, model: Any) -> str | None:
    """a `vocab_size` that tp does not divide"""
    return indivisible("vocab_size", args.padded_vocab_size, args=args)
