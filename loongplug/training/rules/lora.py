"""Adapters, and modules with learning rates of their own."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from loongplug.models.lora import LINEARS, LoraSettings
from loongplug.models.registry import family_of
from loongplug.training.freezing import freezing_of, trained_modules
from loongplug.training.rules.rule import rule
from loongplug.training.rules.start import WRITTEN, value_if_any, within_export


def _lora(model: Any) -> Iterator[tuple[str, LoraSettings]]:
    for name, architecture in model.modules().items():
        if architecture.lora is not None:
            yield f"model.{model.keys[name]}.lora", architecture.lora


@rule(
    reason="an adapter is alpha / rank * B A, with inputs dropped by a probability",
    cure="correct the module's lora",
)
def lora_numbers(args: Namespace, model: Any) -> str | None:
    """a `lora.rank` or `lora.alpha` that is not above 0, a `lora.dropout` outside of 0 to 1"""
    wrong = []
    for key, settings in _lora(model):
        if settings.rank < 1:
            wrong.append(f"{key}.rank is {settings.rank}")
        if settings.alpha is not None and settings.alpha <= 0:
            wrong.append(f"{key}.alpha is {settings.alpha:g}")
        if not 0 <= settings.dropout < 1:
            wrong.append(f"{key}.dropout is {settings.dropout:g}")
    return ", ".join(wrong) or None


@rule(
    reason=f"adapters stand beside {', '.join(LINEARS)}, of which a projector has the last two",
    cure="name these, or ends of their paths such as self_attention.linear_proj",
)
def lora_targets(args: Namespace, model: Any) -> str | None:
    """`lora.target_modules` that is empty or names something else than linears of the module"""
    wrong = []
    for key, settings in _lora(model):
        paths = _linears(args, model, module=key.split(".")[1])
        found = {
            target: any(replace(settings, target_modules=(target,)).targets(path) for path in paths)
            for target in settings.target_modules
        }
        lost = [target for target in found if not found[target] and target not in LINEARS]
        if lost or not any(found.values()):
            wrong.append(f"{key}.target_modules is {list(settings.target_modules)}")
    return ", ".join(wrong) or None


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
def lora_folders(args: Namespace, model: Any) -> str | None:
    """`--save-lora` where no module has `lora`"""
    lost = args.save_lora and not any(_lora(model))
    return "--save-lora with a model without adapters" if lost else None


@rule(
    reason="a folder of adapters has no other weights, so those would be lost",
    cure="add --save-hf DIR for the whole model, or freeze them (model.<module>.freeze=true)",
    training_only=True,
)
def lora_beside_weights(args: Namespace, model: Any) -> str | None:
    """`--save-lora` without `--save-hf` where other weights train than those of adapters"""
    if not args.save_lora or args.save_hf or not any(_lora(model)):
        return None
    whole = _trained(args, model)
    return f"--save-lora with weights of {', '.join(whole)} that train" if whole else None


@rule(
    reason="an export replaces its own files there, and has to find them as it wrote them",
    cure="give the adapters a folder beside the others",
)
def lora_own_folder(args: Namespace, model: Any) -> str | None:
    """`--save-lora` as, in or around the folder of `--save-hf`, as or around that of anything else
    that a run writes or reads, or the working directory
    """
    hf = value_if_any(args, "--save-hf")
    if args.save_lora and hf and Path(args.save_lora).resolve().is_relative_to(Path(hf).resolve()):
        return f"--save-lora {args.save_lora} with --save-hf {hf}"
    return within_export(args, flag="--save-lora", written=("--save-hf", *WRITTEN))


@rule(
    reason="the linears then leave gathering and reducing to Megatron's dispatcher, which "
    "knows no adapters",
    cure="drop the flag, or name target_modules of the attention alone",
)
def lora_shared_experts(args: Namespace, model: Any) -> str | None:
    """`--moe-shared-expert-overlap` with adapters on the shared experts and tp above 1"""
    if not args.moe_shared_expert_overlap or args.moe_shared_expert_intermediate_size is None:
        return None
    adapted = any(
        settings.targets(f"mlp.shared_experts.{linear}")
        for key, settings in _lora(model)
        if key.startswith("model.foundation")
        for linear in ("linear_fc1", "linear_fc2")
    )
    tp = args.tensor_model_parallel_size
    if not adapted or tp < 2:
        return None
    return f"--moe-shared-expert-overlap with adapters on the shared experts and tp {tp}"


@rule(
    reason="a module with no rate does not train",
    cure="give a positive number, or freeze the module",
)
def lr_mult(args: Namespace, model: Any) -> str | None:
    """an `lr_mult` that is not above 0"""
    wrong = [
        f"model.{model.keys[name]}.lr_mult is {architecture.lr_mult:g}"
        for name, architecture in model.modules().items()
        if architecture.lr_mult <= 0
    ]
    return ", ".join(wrong) or None


@rule(
    reason="what is frozen trains at no rate",
    cure="drop lr_mult, or let the module train",
    training_only=True,
)
def lr_mult_frozen(args: Namespace, model: Any) -> str | None:
    """an `lr_mult` of a module of which nothing trains"""
    modules = model.modules().items()
    rated = [name for name, each in modules if each.lr_mult != 1.0 and not each.lora]
    trained = _trained(args, model) if rated else []
    keys = [model.keys[name] for name in rated if name not in trained]
    return ", ".join(f"model.{key}.lr_mult with a frozen {key}" for key in keys) or None


@rule(
    reason="the embeddings would have two learning rates",
    cure="give one of the two",
)
def lr_mult_decoupled(args: Namespace, model: Any) -> str | None:
    """`--decoupled-lr` with `model.foundation.lr_mult`"""
    rate = model.foundation.lr_mult
    if args.decoupled_lr is None or rate == 1.0:
        return None
    return f"--decoupled-lr with model.foundation.lr_mult {rate:g}"
