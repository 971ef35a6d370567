"""Parallel layouts of the encoder that are not the decoder's."""

from argparse import Namespace
from typing import Any

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.training.rules.rule import Rule, indivisible


def encoder_layout(args: Namespace, model: Any) -> str | None:
    """The encoder asks for no tensor parallel size of its own."""
    encoder = getattr(model, "image_encoder", None)
    wanted = getattr(encoder, "tensor_model_parallel_size", None)
    if wanted is None or wanted == args.tensor_model_parallel_size:
        return None
    return (
        f"model.image_encoder.tensor_model_parallel_size {wanted} differs from "
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
    )


def encoder_sizes(args: Namespace, model: Any) -> str | None:
    """The encoder's and the projector's sizes can be split over the decoder's ranks."""
    if not isinstance(model, VisionLanguageArchitecture):
        return None
    encoder = model.image_encoder
    merged = encoder.hidden_size * encoder.spatial_merge_size**2
    problems = (
        indivisible("the encoder's num_attention_heads", encoder.num_attention_heads, args=args),
        indivisible("the encoder's ffn_hidden_size", encoder.ffn_hidden_size, args=args),
        indivisible("the projector's width", merged, args=args),
    )
    return "; ".join(problem for problem in problems if problem) or None


def encoder_hetero_dp(args: Namespace, model: Any) -> str | None:
    """No heterogeneous data parallelism of the encoder."""
    return "--enable-encoder-hetero-dp" if args.enable_encoder_hetero_dp else None


def full_hetero_dp(args: Namespace, model: Any) -> str | None:
    """No encoder phase of its own."""
    return "--enable-full-hetero-dp" if args.enable_full_hetero_dp else None


RULES: tuple[Rule, ...] = (
    Rule(
        name="encoder-layout",
        refuses="an encoder `tensor_model_parallel_size` other than the decoder's",
        check=encoder_layout,
        reason="heterogeneous tensor parallelism is not there yet",
        cure="leave it null",
    ),
    Rule(
        name="encoder-sizes",
        refuses="encoder heads, `ffn_hidden_size` or projector width that tp does not divide",
        check=encoder_sizes,
        reason="encoder and projector are sharded like the decoder",
        cure="choose another --tensor-model-parallel-size",
    ),
    Rule(
        name="encoder-hetero-dp",
        refuses="`--enable-encoder-hetero-dp`",
        check=encoder_hetero_dp,
        reason="heterogeneous data parallelism of the encoder is not there yet",
        cure="drop the flag: the encoder then runs in the first stage's tensor parallel group",
    ),
    Rule(
        name="full-hetero-dp",
        refuses="`--enable-full-hetero-dp`",
        check=full_hetero_dp,
        reason="full separation of encoder and decoder is not there yet",
        cure="drop the flag: the encoder then runs in the first stage's tensor parallel group",
    ),
)
