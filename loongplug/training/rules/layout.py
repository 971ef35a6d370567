"""The world, and the tensor parallel size of the decoder."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import Rule, indivisible, model_parallel_size


def world_size(args: Namespace, model: Any) -> str | None:
    """The ranks share out evenly over copies of the model."""
    layout = model_parallel_size(args)
    if layout < 1 or args.world_size % layout == 0:
        return None
    return (
        f"{args.world_size} ranks do not divide by tp {args.tensor_model_parallel_size} x "
        f"pp {args.pipeline_model_parallel_size} x cp {args.context_parallel_size} = {layout}"
    )


def sequence_parallel(args: Namespace, model: Any) -> str | None:
    """Under sequence parallelism, a sequence can be split over the tensor parallel ranks."""
    if not args.sequence_parallel or args.seq_length is None:
        return None
    return indivisible("--seq-length", args.seq_length, args=args)


def context_parallel(args: Namespace, model: Any) -> str | None:
    """No context parallelism."""
    size = args.context_parallel_size
    return f"--context-parallel-size {size}" if size > 1 else None


def decoder_heads(args: Namespace, model: Any) -> str | None:
    """The decoder's heads and query groups can be split over the tensor parallel ranks."""
    problems = (
        indivisible("the decoder's num_attention_heads", args.num_attention_heads, args=args),
        indivisible("the decoder's num_query_groups", args.num_query_groups, args=args),
    )
    return "; ".join(problem for problem in problems if problem) or None


def decoder_ffn(args: Namespace, model: Any) -> str | None:
    """The decoder's feed-forward width can be split over the tensor parallel ranks."""
    if args.num_experts:  # no layer has that width
        return None
    return indivisible("the decoder's ffn_hidden_size", args.ffn_hidden_size, args=args)


def vocabulary(args: Namespace, model: Any) -> str | None:
    """The vocabulary can be split over the tensor parallel ranks without padding."""
    return indivisible("vocab_size", args.padded_vocab_size, args=args)


RULES: tuple[Rule, ...] = (
    Rule(
        name="world-size",
        refuses="the number of ranks is no multiple of tp x pp x cp",
        check=world_size,
        reason="each model replica takes that many ranks",
        cure="change the number of processes, or the parallel sizes",
    ),
    Rule(
        name="sequence-parallel",
        refuses="`--sequence-parallel` with a sequence length that tp does not divide",
        check=sequence_parallel,
        reason="each rank of the group holds an equal slice of the sequence",
        cure="give a multiple of tp",
    ),
    Rule(
        name="context-parallel",
        refuses="`--context-parallel-size` above 1",
        check=context_parallel,
        reason="deepstack and images are not split along the sequence yet",
        cure="use tensor and sequence parallelism for long sequences",
    ),
    Rule(
        name="decoder-heads",
        refuses="decoder heads or query groups (key and value heads) that tp does not divide",
        check=decoder_heads,
        reason="each rank holds whole groups of heads",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="decoder-ffn",
        refuses="a decoder `ffn_hidden_size` that tp does not divide",
        check=decoder_ffn,
        reason="each rank holds an equal slice",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="vocabulary",
        refuses="a `vocab_size` that tp does not divide",
        check=vocabulary,
        reason="the embedding is sharded, and padding it would change the checkpoint",
        cure="choose another --tensor-model-parallel-size, or raise model.foundation.vocab_size",
    ),
)
