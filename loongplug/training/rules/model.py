"""The model by itself. Checks of what one family has answer None for the others."""

import math
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import rule


@rule(reason="no such module can be built", cure="correct the YAML")
def positive_sizes(args: Namespace, model: Any) -> str | None:
    """a size, or another number, of the model that is not above 0"""
    wrong = [
        f"model.{model.keys[module]}.{name} is {value}"
        for module, architecture in model.modules().items()
        for name, value in vars(architecture).items()
        if type(value) in (int, float) and value <= 0 and name != "lr_mult"
    ]
    return ", ".join(wrong) or None


@rule(
    reason="every group serves the same number of heads",
    cure="correct model.foundation.num_query_groups",
)
def query_groups(args: Namespace, model: Any) -> str | None:
    """decoder heads that do not divide by the query groups"""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if groups < 1 or heads % groups == 0:
        return None
    return f"the decoder's {heads} heads do not divide by its {groups} query groups"


@rule(
    reason="rotary positions split a head in four, and the table is a square grid",
    cure="correct model.image_encoder",
)
def encoder_shape(args: Namespace, model: Any) -> str | None:
    """encoder heads whose size is not a multiple of 4, or a position table that is not a square"""
    if positive_sizes(args, model) is not None:
        return None
    encoder = model.vision
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    if hidden % heads or hidden // heads % 4:
        return f"the encoder's hidden_size {hidden} over {heads} heads is not a multiple of 4"
    table = getattr(encoder, "num_position_embeddings", 1)
    if math.isqrt(table) ** 2 != table:
        return f"num_position_embeddings {table} is not a square"
    return None


@rule(
    reason="tap j of the encoder is added behind decoder layer j",
    cure="correct model.image_encoder.deepstack_layers",
)
def deepstack(args: Namespace, model: Any) -> str | None:
    """`deepstack_layers` out of range, unsorted, or more than there are decoder layers"""
    taps, layers = model.vision.taps(), model.vision.num_layers
    if list(taps) != sorted(set(taps)) or any(not 0 <= tap < layers for tap in taps):
        return f"deepstack_layers {list(taps)} of an encoder of {layers} layers"
    if len(taps) > model.foundation.num_layers:
        return f"{len(taps)} deepstack_layers for {model.foundation.num_layers} decoder layers"
    return None


@rule(
    reason="windows are made of whole tokens, and a layer that does not exist attends to nothing",
    cure="correct model.image_encoder",
)
def windows(args: Namespace, model: Any) -> str | None:
    """a `window_size` smaller than one token, `full_attention_layers` out of range or unsorted"""
    if positive_sizes(args, model) is not None:
        return None
    encoder = model.vision
    side = getattr(encoder, "window_size", None)
    if side is None:
        return None
    token = encoder.patch_size * encoder.spatial_merge_size
    if side < token:
        return f"window_size {side} with tokens of {token} x {token} pixels"
    full, layers = encoder.full_attention_layers, encoder.num_layers
    if list(full) != sorted(set(full)) or any(not 0 <= layer < layers for layer in full):
        return f"full_attention_layers {list(full)} of an encoder of {layers} layers"
    return None


@rule(
    reason="it deals out a head's pairs of channels to time, height and width",
    cure="correct model.foundation.mrope_section",
)
def mrope(args: Namespace, model: Any) -> str | None:
    """an `mrope_section` that does not sum to half of `kv_channels`, or cannot interleave"""
    sections, channels = model.foundation.mrope_section, model.foundation.kv_channels
    pairs = channels // 2
    if channels % 2 or sum(sections) != pairs or min(sections) < 0:
        return f"mrope_section {list(sections)} with kv_channels {channels}"
    # Height takes every third pair from the second one on, width from the third one on.
    if model.foundation.interleaved_mrope and any(
        axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2)
    ):
        return f"mrope_section {list(sections)} leaves no room to interleave height and width"
    return None
