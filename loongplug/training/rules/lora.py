"""Adapters, and learning rates of modules.

Whether a pattern freezes anything, and whether anything trains, is known when the model is built.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from loongplug.models.lora import LINEARS, LoraSettings
from loongplug.models.registry import family_of
from loongplug.training.freezing import freezing_of, trained_modules
from loongplug.training.rules.rule import Problems, modules_of, rule


def _lora(model: Any) -> Iterator[tuple[str, LoraSettings]]:
    """The adapters' settings of each module that has any, with the key that users write."""
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
    """The modules of which anything trains beside adapters."""
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
