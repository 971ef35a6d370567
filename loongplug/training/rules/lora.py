"""Adapters, and modules with learning rates of their own."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.lora.settings import LINEARS, LoraSettings
from loongplug.training.rules.rule import Rule

_MODULES = ("image_encoder", "image_projector", "foundation")


def _lora(model: Any) -> Iterator[tuple[str, LoraSettings]]:
    if isinstance(model, VisionLanguageArchitecture):
        for name in _MODULES:
            settings = getattr(model, name).lora
            if settings is not None:
                yield f"model.{name}.lora", settings


def lora_numbers(args: Namespace, model: Any) -> str | None:
    """Rank and alpha are above 0, the dropout is a probability below 1."""
    wrong = []
    for key, settings in _lora(model):
        if settings.rank < 1:
            wrong.append(f"{key}.rank is {settings.rank}")
        if settings.alpha is not None and settings.alpha <= 0:
            wrong.append(f"{key}.alpha is {settings.alpha:g}")
        if not 0 <= settings.dropout < 1:
            wrong.append(f"{key}.dropout is {settings.dropout:g}")
    return ", ".join(wrong) or None


def lora_targets(args: Namespace, model: Any) -> str | None:
    """Every target is the end of some linear's path in the module."""
    wrong = []
    for key, settings in _lora(model):
        paths = _paths(key)
        known = [
            any(f".{path}".endswith(f".{target}") for path in paths)
            for target in settings.target_modules
        ]
        named = set(settings.target_modules) <= set(LINEARS)  # the default, of any module
        if not any(known) or not (named or all(known)):
            wrong.append(f"{key}.target_modules is {list(settings.target_modules)}")
    return ", ".join(wrong) or None


def _paths(key: str) -> tuple[str, ...]:
    if "projector" in key:
        return ("merger.linear_fc1", "merger.linear_fc2")
    within = {"linear_qkv": "self_attention", "linear_proj": "self_attention"}
    return tuple(f"{within.get(name, 'mlp')}.{name}" for name in LINEARS)


def lora_folders(args: Namespace, model: Any) -> str | None:
    """Folders of adapters go with a model that has some."""
    flags = [flag for flag in ("--load-lora", "--save-lora") if getattr(args, _name(flag))]
    if not flags or any(True for _ in _lora(model)):
        return None
    return f"{' and '.join(flags)} with a model without adapters"


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def rate_multiples(args: Namespace, model: Any) -> str | None:
    """Multiples of the learning rate are above 0."""
    if not isinstance(model, VisionLanguageArchitecture):
        return None
    rate = model.image_projector.lr_mult  # the other modules' are sizes to another rule
    return f"model.image_projector.lr_mult is {rate:g}" if rate <= 0 else None


def rates_twice(args: Namespace, model: Any) -> str | None:
    """Embeddings have one learning rate."""
    if not isinstance(model, VisionLanguageArchitecture) or args.decoupled_lr is None:
        return None
    rate = model.foundation.lr_mult
    return f"--decoupled-lr with model.foundation.lr_mult {rate:g}" if rate != 1.0 else None


RULES: tuple[Rule, ...] = (
    Rule(
        name="lora-numbers",
        refuses="a `lora.rank` or `lora.alpha` that is not above 0, a `lora.dropout` outside of "
        "0 to 1",
        check=lora_numbers,
        reason="an adapter is alpha / rank * B A, with inputs dropped by a probability",
        cure="correct the module's lora",
    ),
    Rule(
        name="lora-targets",
        refuses="`lora.target_modules` that is empty or names something else than linears of the "
        "module",
        check=lora_targets,
        reason=f"adapters stand beside {', '.join(LINEARS)}, of which a projector has the last two",
        cure="name these, or ends of their paths such as self_attention.linear_proj",
    ),
    Rule(
        name="lora-folders",
        refuses="`--load-lora` or `--save-lora` where no module has `lora`",
        check=lora_folders,
        reason="there would be nothing to read or write",
        cure="give the module its adapters, such as +model.foundation.lora.rank=8",
    ),
    Rule(
        name="lr-mult",
        refuses="an `lr_mult` that is not above 0",
        check=rate_multiples,
        reason="a module with no rate does not train",
        cure="give a positive number, or freeze the module",
    ),
    Rule(
        name="lr-mult-decoupled",
        refuses="`--decoupled-lr` with `model.foundation.lr_mult`",
        check=rates_twice,
        reason="the embeddings would have two learning rates",
        cure="give one of the two",
    ),
)
