"""The model by itself, its adapters, and learning rates of modules.

A check for one family says nothing of the others. Whether a pattern freezes anything, and whether
anything trains, is known when the model is built.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from loongplug.models.architecture import MultimodalTextArchitecture, RotaryVisionArchitecture
from loongplug.models.lora import LINEARS, LoraSettings
from loongplug.models.registry import family_of
from loongplug.training.freezing import freezing_of, trained_modules
from loongplug.training.rules.rule import Problems, encoders_of, modules_of, rule


@rule(reason="no such module can be built, or trains", cure="correct the YAML, or the override")
def positive_sizes(args: Namespace, model: Any) -> Problems:
    """a size, or another number, of a module, its adapters or its `rope_scaling` that is not above
    0; a `dropout` that is not in 0 to 1
    """
    for key, module in modules_of(model):
        numbers = {f"{key}.{name}": value for name, value in vars(module).items()}
        for part in ("lora", "rope_scaling"):
            if settings := getattr(module, part, None):
                numbers |= {f"{key}.{part}.{name}": value for name, value in vars(settings).items()}
        for path, value in numbers.items():
            may_be_0 = path.endswith("dropout")
            if type(value) not in (int, float) or path.endswith("feature_layer"):
                continue
            if not 0 <= value < 1 if may_be_0 else value <= 0:
                yield f"{path} is {value}"


@rule(
    reason="rotary positions split a head in four, position tables are square, windows are made of "
    "whole tokens, and tap j of the encoder is added behind decoder layer j",
    cure="correct that encoder in the YAML",
)
def encoder_shape(args: Namespace, model: Any) -> Problems:
    """encoder heads of unequal size, or with 2D rope of one that is not a multiple of 4; a position
    table that is not a square; `deepstack_layers` or `full_attention_layers` out of range or
    unsorted, or more of the first than there are decoder layers; a `window_size` smaller than one
    token; an `output_dim` of sounds that is not the decoder's `hidden_size`
    """
    if positive_sizes(args, model) is not None:
        return
    text = model.foundation
    for key, encoder in encoders_of(model):
        hidden, heads = encoder.hidden_size, encoder.num_attention_heads
        rotary = isinstance(encoder, RotaryVisionArchitecture)
        if hidden % heads or (rotary and hidden // heads % 4):
            unit = "a multiple of 4" if rotary else "a whole number"
            yield f"{key}.hidden_size {hidden} over {heads} heads is not {unit}"
        table = getattr(encoder, "num_position_embeddings", 1)
        if math.isqrt(table) ** 2 != table:
            yield f"{key}.num_position_embeddings {table} is not a square"
        known = range(encoder.num_layers)
        for name in ("deepstack_layers", "full_attention_layers"):
            layers = list(getattr(encoder, name, None) or ())
            if layers != sorted({*layers} & {*known}):
                yield f"{key}.{name} {layers} with {len(known)} layers"
        if len(encoder.taps()) > text.num_layers:
            yield f"{len(encoder.taps())} deepstack_layers for {text.num_layers} decoder layers"
        side = getattr(encoder, "window_size", None)
        if side is not None and side < (token := encoder.patch_size * encoder.spatial_merge_size):
            yield f"{key}.window_size {side} with tokens of {token} x {token} pixels"
        if (width := getattr(encoder, "output_dim", text.hidden_size)) != text.hidden_size:
            yield f"{key}.output_dim {width} with hidden_size {text.hidden_size}"


@rule(
    reason="every group serves the same number of heads, and positions turn a head's channels in "
    "pairs, which mrope deals out to time, height and width",
    cure="correct model.foundation",
)
def decoder_shape(args: Namespace, model: Any) -> Problems:
    """decoder heads that do not divide by the query groups, or with an odd number of channels; an
    `mrope_section` that does not sum to half of `kv_channels`, or cannot interleave; a
    `rope_scaling` whose `high_freq_factor` is not the higher one
    """
    text, heads, groups = model.foundation, args.num_attention_heads, args.num_query_groups
    if groups > 0 and heads % groups:
        yield f"the decoder's {heads} heads do not divide by its {groups} query groups"
    if text.kv_channels % 2:
        yield f"kv_channels {text.kv_channels}"
    elif isinstance(text, MultimodalTextArchitecture):
        sections, pairs = text.mrope_section, text.kv_channels // 2
        if sum(sections) != pairs or min(sections) < 0:
            yield f"mrope_section {list(sections)} with kv_channels {text.kv_channels}"
        # Height takes every third pair from the second one on, width from the third one on.
        elif text.interleaved_mrope and any(i + 3 * (sections[i] - 1) >= pairs for i in (1, 2)):
            yield f"mrope_section {list(sections)} leaves no room to interleave height and width"
    scaling = getattr(text, "rope_scaling", None)
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield f"rope_scaling {scaling}"


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


def _lora(model: Any) -> Iterator[tuple[str, LoraSettings]]:
    for key, module in modules_of(model):
        if module.lora is not None:
            yield f"{key}.lora", module.lora


@rule(
    reason=f"adapters stand beside {', '.join(LINEARS)}, of which a projector has the last two",
    cure="name these, or ends of their paths such as self_attention.linear_proj",
)
def lora_targets(args: Namespace, model: Any) -> Problems:
    """`lora.target_modules` that is empty or names something else than linears of the module"""
    for key, settings in _lora(model):
        paths = _linears(args, model, module=key.split(".")[1])
        found = {
            target: any(replace(settings, target_modules=(target,)).targets(path) for path in paths)
            for target in settings.target_modules
        }
        lost = [target for target in found if not found[target] and target not in LINEARS]
        if lost or not any(found.values()):
            yield f"{key}.target_modules is {list(settings.target_modules)}"


def _linears(args: Namespace, model: Any, *, module: str) -> list[str]:
    """The paths of a module's tensors, with ``{}`` for layers, less what they end with."""
    family = family_of(type(model), trusted_packages=args.trusted_packages)
    (built,) = (name for name, key in model.keys.items() if key == module)
    return [
        row.names[0].removeprefix(f"{built}.").removesuffix(".weight")
        for row in family.load_hugging_face(model).mapping.rows
        if row.names[0].startswith(f"{built}.")
    ]


def _trained(args: Namespace, model: Any) -> list[str]:
    family = family_of(type(model), trusted_packages=args.trusted_packages)
    mapping = family.load_hugging_face(model).mapping
    return trained_modules(freezing_of(args, model), mapping=mapping)


@rule(
    reason="there would be nothing to write",
    cure="give the module its adapters, such as model.foundation.lora.rank=8",
)
def lora_folders(args: Namespace, model: Any) -> Problems:
    """`--save-lora` where no module has `lora`"""
    if args.save_lora and not any(_lora(model)):
        yield "--save-lora with a model without adapters"


@rule(
    reason="a folder of adapters has no other weights, so those would be lost",
    cure="add --save-hf DIR for the whole model, or freeze them (model.<module>.freeze=true)",
    training_only=True,
)
def lora_beside_weights(args: Namespace, model: Any) -> Problems:
    """`--save-lora` without `--save-hf` where other weights train than those of adapters"""
    if args.save_lora and not args.save_hf and any(_lora(model)):
        whole = ", ".join(_trained(args, model))
        if whole:
            yield f"--save-lora with weights of {whole} that train"


@rule(
    reason="the linears then leave gathering and reducing to Megatron's dispatcher, which "
    "knows no adapters",
    cure="drop the flag, or name target_modules of the attention alone",
)
def lora_shared_experts(args: Namespace, model: Any) -> Problems:
    """`--moe-shared-expert-overlap` with adapters on the shared experts and tp above 1"""
    tp, foundation = args.tensor_model_parallel_size, model.foundation.lora
    overlaps = args.moe_shared_expert_overlap and args.moe_shared_expert_intermediate_size
    linears = (f"mlp.shared_experts.{linear}" for linear in ("linear_fc1", "linear_fc2"))
    if overlaps and foundation and tp > 1 and any(map(foundation.targets, linears)):
        yield f"--moe-shared-expert-overlap with adapters on the shared experts and tp {tp}"


@rule(
    reason="what is frozen trains at no rate",
    cure="drop lr_mult, or let the module train",
    training_only=True,
)
def lr_mult_frozen(args: Namespace, model: Any) -> Problems:
    """an `lr_mult` of a module of which nothing trains"""
    modules = model.modules().items()
    rated = [name for name, each in modules if each.lr_mult != 1.0 and not each.lora]
    trained = _trained(args, model) if rated else []
    for key in (model.keys[name] for name in rated if name not in trained):
        yield f"model.{key}.lr_mult with a frozen {key}"


@rule(
    reason="the embeddings would have two learning rates",
    cure="give one of the two",
)
def lr_mult_decoupled(args: Namespace, model: Any) -> Problems:
    """`--decoupled-lr` with `model.foundation.lr_mult`"""
    rate = model.foundation.lr_mult
    if args.decoupled_lr is not None and rate != 1.0:
        yield f"--decoupled-lr with model.foundation.lr_mult {rate:g}"
