"""The checks behind the table of start-up rules that look at the model: its sizes, and tp.

They follow the contract of :mod:`loongplug.training.checks`. Those that know one family's modules
answer None for other families.
"""

import math
from argparse import Namespace
from typing import Any

from loongplug.models.architecture import VisionLanguageArchitecture

# Tensor parallel sizes.


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


# The model by itself.


def positive_sizes(args: Namespace, model: Any) -> str | None:
    """Every number that describes the model is above zero."""
    if not isinstance(model, VisionLanguageArchitecture):
        return None
    wrong = [
        f"model.{part}.{name} is {getattr(config, name)}"
        for part, config in (
            ("image_encoder", model.image_encoder),
            ("foundation", model.foundation),
        )
        for name, value in vars(config).items()
        if type(value) in (int, float) and value <= 0
    ]
    return ", ".join(wrong) or None


def query_groups(args: Namespace, model: Any) -> str | None:
    """The decoder's heads share out evenly over its query groups."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if groups < 1 or heads % groups == 0:
        return None
    return f"the decoder's {heads} heads do not divide by its {groups} query groups"


def encoder_shape(args: Namespace, model: Any) -> str | None:
    """The encoder's heads can be turned by row and column; its position table is square."""
    if not isinstance(model, VisionLanguageArchitecture) or positive_sizes(args, model) is not None:
        return None
    encoder = model.image_encoder
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    if hidden % heads or hidden // heads % 4:
        return f"the encoder's hidden_size {hidden} over {heads} heads is no multiple of 4"
    table = getattr(encoder, "num_position_embeddings", 1)
    if math.isqrt(table) ** 2 != table:
        return f"num_position_embeddings {table} is no square"
    return None


def deepstack(args: Namespace, model: Any) -> str | None:
    """The deepstack taps are layers that exist, in order, one decoder layer for each."""
    if not isinstance(model, VisionLanguageArchitecture):
        return None
    taps = getattr(model.image_encoder, "deepstack_layers", ())
    layers = model.image_encoder.num_layers
    if list(taps) != sorted(set(taps)) or any(not 0 <= tap < layers for tap in taps):
        return f"deepstack_layers {list(taps)} of an encoder of {layers} layers"
    if len(taps) > model.foundation.num_layers:
        return f"{len(taps)} deepstack_layers for {model.foundation.num_layers} decoder layers"
    return None


def windows(args: Namespace, model: Any) -> str | None:
    """A window holds at least one token; the layers of full attention exist, in order."""
    if not isinstance(model, VisionLanguageArchitecture) or positive_sizes(args, model) is not None:
        return None
    encoder = model.image_encoder
    side = getattr(encoder, "window_size", None)
    if side is None:
        return None
    token = encoder.patch_size * encoder.spatial_merge_size
    if side < token:
        return f"window_size {side} with tokens of {token} x {token} pixels"
    full, layers = encoder.full_attention_layers, encoder.num_layers  # type: ignore[attr-defined]
    if list(full) != sorted(set(full)) or any(not 0 <= layer < layers for layer in full):
        return f"full_attention_layers {list(full)} of an encoder of {layers} layers"
    return None


def mrope(args: Namespace, model: Any) -> str | None:
    """The sections of the rotary embedding cover its channel pairs and can be interleaved."""
    if not isinstance(model, VisionLanguageArchitecture):
        return None
    sections, pairs = model.foundation.mrope_section, model.foundation.kv_channels // 2
    if model.foundation.kv_channels % 2 or sum(sections) != pairs or min(sections) < 0:
        return f"mrope_section {list(sections)} with kv_channels {model.foundation.kv_channels}"
    # Height takes every third pair from the second one on, width from the third one on.
    if model.foundation.interleaved_mrope and any(
        axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2)
    ):
        return f"mrope_section {list(sections)} leaves no room to interleave height and width"
    return None


def indivisible(what: str, value: int, *, args: Namespace) -> str | None:
    """``what`` with its ``value`` can be split over the tensor parallel ranks."""
    tp = args.tensor_model_parallel_size
    return f"{what} {value} does not divide by tp {tp}" if tp > 0 and value % tp else None
