"""Adapters, and modules with learning rates of their own."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.lora.settings import LINEARS, LoraSettings
from loongplug.models.registry import family_of
from loongplug.training.freezing import MODULES
from loongplug.training.rules.rule import Rule


def _lora(model: Any) -> Iterator[tuple[str, LoraSettings]]:
    if isinstance(model, VisionLanguageArchitecture):
        for name in MODULES:
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
    """Every target is a linear of the module; the names of all kinds may be given to any module."""
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
    built = MODULES[module]
    return [
        row.names[0].removeprefix(f"{built}.").removesuffix(".weight")
        for row in family.load_hugging_face(model).mapping.rows
        if row.names[0].startswith(f"{built}.")
    ]


def lora_folders(args: Namespace, model: Any) -> str | None:
    """Folders of adapters go with a model that has some."""
    flags = [flag for flag in ("--load-lora", "--save-lora") if getattr(args, _name(flag))]
    if not flags or any(True for _ in _lora(model)):
        return None
    return f"{' and '.join(flags)} with a model without adapters"


def lora_own_folder(args: Namespace, model: Any) -> str | None:
    """What a run writes leaves the folder of adapters to them."""
    return shared_lora_folder(args)


def shared_lora_folder(args: Namespace) -> str | None:
    """What else is written to or around ``--save-lora``, or into it; of train.py's arguments.

    A checkpoint's folder may have others in it: its own files are all named by iterations.
    """
    if not args.save_lora:
        return None
    lora = Path(args.save_lora).resolve()
    for flag in ("--save-hf", "--save"):
        given = getattr(args, _name(flag))
        other = Path(given).resolve() if given else None
        if other is None:
            continue
        around = flag == "--save-hf" and lora.is_relative_to(other)
        if other.is_relative_to(lora) or around:
            return f"--save-lora {args.save_lora} with {flag} {given}"
    return None


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


def shared_experts_beside_the_exchange(args: Namespace, model: Any) -> str | None:
    """An adapter does what its linear does, which with this flag depends on who calls it."""
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


OWN_FOLDER = "give the adapters a folder beside the others"

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
        name="lora-own-folder",
        refuses="`--save-lora` as, in or around the folder of `--save-hf`, as or around that of "
        "`--save`",
        check=lora_own_folder,
        reason="an export replaces its whole folder, and nothing that is not its own",
        cure=OWN_FOLDER,
    ),
    Rule(
        name="lora-shared-experts",
        refuses="`--moe-shared-expert-overlap` with adapters on the shared experts and tp above 1",
        check=shared_experts_beside_the_exchange,
        reason="the linears then leave gathering and reducing to Megatron's dispatcher, which "
        "knows no adapters",
        cure="drop the flag, or name target_modules of the attention alone",
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
