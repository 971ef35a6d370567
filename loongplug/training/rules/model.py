"""The model by itself. A check for one family says nothing of the others."""

import math
from argparse import Namespace
from typing import Any

from loongplug.models.architecture import MultimodalTextArchitecture, RotaryVisionArchitecture
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.training.rules.rule import Problems, encoders_of, modules_of, rule

# Numbers of an architecture that may be 0 or less, or that another rule looks at.
_OF_OTHER_RULES = ("lr_mult", "feature_layer", "rank_offset", "joined_rows")


@rule(reason="no such module can be built", cure="correct the YAML")
def positive_sizes(args: Namespace, model: Any) -> Problems:
    """a size, or another number, of the model that is not above 0"""
    for key, module in modules_of(model):
        for name, value in vars(module).items():
            if type(value) in (int, float) and value <= 0 and name not in _OF_OTHER_RULES:
                yield f"{key}.{name} is {value}"


@rule(
    reason="a pass through an encoder has at least one unit, however small the budget",
    cure="give 1, with which each unit is encoded by itself, or more, or leave it out",
)
def joined_rows(args: Namespace, model: Any) -> Problems:
    """an encoder's `joined_rows` below 1"""
    for key, encoder in encoders_of(model):
        if encoder.joined_rows < 1:
            yield f"{key}.joined_rows is {encoder.joined_rows}"


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
    reason="it blends frequencies that turn more and less often than the two say in the text's "
    "original length",
    cure="correct model.foundation.rope_scaling",
)
def rope_scaling(args: Namespace, model: Any) -> Problems:
    """a `rope_scaling` that is not above 0, or whose `high_freq_factor` is not the higher one"""
    scaling: Llama3Scaling | None = getattr(model.foundation, "rope_scaling", None)
    if scaling is None:
        return
    wrong = [f"{name} {value}" for name, value in vars(scaling).items() if value <= 0]
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not wrong and high <= low:
        wrong = [f"high_freq_factor {high} and low_freq_factor {low}"]
    if wrong:
        yield f"rope_scaling has {', '.join(wrong)}"


@rule(
    reason="transformers turns queries and keys of longer texts more slowly, by their length",
    cure="choose a --seq-length up to model.foundation.max_position_embeddings",
)
def dynamic_rope(args: Namespace, model: Any) -> Problems:
    """a decoder with a `dynamic_rope_factor` and rows longer than its `max_position_embeddings`"""
    text, longest = model.foundation, model.foundation.max_position_embeddings
    dynamic = getattr(text, "dynamic_rope_factor", None) is not None
    if dynamic and args.seq_length is not None and longest < args.seq_length:
        yield (
            f"max_position_embeddings {longest} is shorter than --seq-length {args.seq_length}, "
            "with dynamic_rope_factor"
        )


@rule(
    reason="every token of a row attends to all before it",
    cure="choose a --seq-length up to model.foundation.sliding_window",
)
def sliding_window(args: Namespace, model: Any) -> Problems:
    """a decoder's `sliding_window` that is shorter than `--seq-length`"""
    window = getattr(model.foundation, "sliding_window", None)
    if window is not None and args.seq_length is not None and window < args.seq_length:
        yield f"sliding_window {window} is shorter than --seq-length {args.seq_length}"
