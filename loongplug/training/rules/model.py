"""The model by itself. A check for one family says nothing of the others."""

import math
from argparse import Namespace
from typing import Any

from loongplug.models.architecture import MultimodalTextArchitecture, RotaryVisionArchitecture
from loongplug.training.rules.rule import Problems, encoders_of, modules_of, rule

# Numbers that may be 0 or less.
_ANY = ("feature_layer", "dropout")


@rule(reason="no such module can be built, or trains", cure="correct the YAML, or the override")
def positive_sizes(args: Namespace, model: Any) -> Problems:
    """a size, or another number, of a module or its adapters that is not above 0"""
    for key, module in modules_of(model):
        numbers = {f"{key}.{name}": value for name, value in vars(module).items()}
        if module.lora is not None:
            numbers |= {f"{key}.lora.{name}": value for name, value in vars(module.lora).items()}
        for path, value in numbers.items():
            if type(value) in (int, float) and value <= 0 and not path.endswith(_ANY):
                yield f"{path} is {value}"


@rule(
    reason="every group serves the same number of heads",
    cure="correct model.foundation.num_query_groups",
)
def query_groups(args: Namespace, model: Any) -> Problems:
    """decoder heads that do not divide by the query groups"""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if groups > 0 and heads % groups:
        yield f"the decoder's {heads} heads do not divide by its {groups} query groups"


@rule(
    reason="rotary positions split a head in four, and the table is a square grid",
    cure="correct the sizes of that encoder",
)
def encoder_shape(args: Namespace, model: Any) -> Problems:
    """encoder heads of unequal size, or with 2D rope of one that is not a multiple of 4; a position
    table that is not a square"""
    if positive_sizes(args, model) is not None:
        return
    for key, encoder in encoders_of(model):
        hidden, heads = encoder.hidden_size, encoder.num_attention_heads
        rotary = isinstance(encoder, RotaryVisionArchitecture)
        if hidden % heads or (rotary and hidden // heads % 4):
            unit = "a multiple of 4" if rotary else "a whole number"
            yield f"{key}.hidden_size {hidden} over {heads} heads is not {unit}"
        table = getattr(encoder, "num_position_embeddings", 1)
        if math.isqrt(table) ** 2 != table:
            yield f"{key}.num_position_embeddings {table} is not a square"


@rule(
    reason="tap j of the encoder is added behind decoder layer j",
    cure="correct model.image_encoder.deepstack_layers",
)
def deepstack(args: Namespace, model: Any) -> Problems:
    """`deepstack_layers` out of range, unsorted, or more than there are decoder layers"""
    most = model.foundation.num_layers
    for _, encoder in encoders_of(model):
        taps, layers = list(encoder.taps()), encoder.num_layers
        if not _is_rising(taps, below=layers):
            yield f"deepstack_layers {taps} of an encoder of {layers} layers"
        elif len(taps) > most:
            yield f"{len(taps)} deepstack_layers for {most} decoder layers"


@rule(
    reason="windows are made of whole tokens, and a layer that does not exist attends to nothing",
    cure="correct model.image_encoder",
)
def windows(args: Namespace, model: Any) -> Problems:
    """a `window_size` smaller than one token, `full_attention_layers` out of range or unsorted"""
    if positive_sizes(args, model) is not None:
        return
    for _, encoder in encoders_of(model):
        side = getattr(encoder, "window_size", None)
        if side is None:
            continue
        token, layers = encoder.patch_size * encoder.spatial_merge_size, encoder.num_layers
        full = list(encoder.full_attention_layers)
        if side < token:
            yield f"window_size {side} with tokens of {token} x {token} pixels"
        if not _is_rising(full, below=layers):
            yield f"full_attention_layers {full} of an encoder of {layers} layers"


def _is_rising(numbers: list[int], *, below: int) -> bool:
    """Whether these are layers of an encoder, each once and in order."""
    return numbers == sorted(set(numbers) & set(range(below)))


@rule(
    reason="its files have that width once more, of what they keep beside the states",
    cure="set model.audio_encoder.output_dim to model.foundation.hidden_size",
)
def audio_output(args: Namespace, model: Any) -> Problems:
    """an encoder of sounds whose `output_dim` is not the decoder's `hidden_size`"""
    hidden = model.foundation.hidden_size
    for key, encoder in encoders_of(model):
        width = getattr(encoder, "output_dim", hidden)
        if width != hidden:
            yield f"{key}.output_dim {width} with hidden_size {hidden}"


@rule(
    reason="positions turn a head's channels in pairs",
    cure="correct model.foundation.kv_channels",
)
def head_channels(args: Namespace, model: Any) -> Problems:
    """decoder heads with an odd number of channels"""
    channels = model.foundation.kv_channels
    if channels % 2:
        yield f"kv_channels {channels}"


@rule(
    reason="it deals out a head's pairs of channels to time, height and width",
    cure="correct model.foundation.mrope_section",
)
def mrope(args: Namespace, model: Any) -> Problems:
    """an `mrope_section` that does not sum to half of `kv_channels`, or cannot interleave"""
    text = model.foundation
    if not isinstance(text, MultimodalTextArchitecture) or head_channels(args, model) is not None:
        return
    sections, pairs = text.mrope_section, text.kv_channels // 2
    if sum(sections) != pairs or min(sections) < 0:
        yield f"mrope_section {list(sections)} with kv_channels {text.kv_channels}"
        return
    # Height takes every third pair from the second one on, width from the third one on.
    if text.interleaved_mrope and any(axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2)):
        yield f"mrope_section {list(sections)} leaves no room to interleave height and width"


@rule(
    reason="every token of a row attends to all before it, and transformers turns queries and keys "
    "of longer texts more slowly where rope is dynamic",
    cure="choose a --seq-length up to it",
)
def longest_row(args: Namespace, model: Any) -> Problems:
    """a decoder's `sliding_window`, or `max_position_embeddings` with a `dynamic_rope_factor`, that
    is shorter than `--seq-length`
    """
    text, bounds = model.foundation, ["sliding_window"]
    if getattr(text, "dynamic_rope_factor", None) is not None:
        bounds.append("max_position_embeddings")
    for name in bounds:
        bound = getattr(text, name, None)
        if None not in (bound, args.seq_length) and bound < args.seq_length:
            yield f"{name} {bound} is shorter than --seq-length {args.seq_length}"
