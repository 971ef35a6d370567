"""The model families and parts LoongPlug knows, and how a package outside it adds its own."""

import importlib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loongplug.models.family import ANY, Family
from loongplug.models.parts import Part, dotted

# The modules here that have families or parts, whichever a family joins first.
_BUILT_IN = tuple(
    f"loongplug.models.{name}"
    for name in (
        "audio_transformer",
        "hugging_face_encoder",
        "internvl",
        "llava",
        "patch_transformer",
        "projectors",
        "qwen2_5_omni",
        "qwen2_5_vl",
        "qwen2_audio",
        "qwen3_vl",
        "qwen3_vl_moe",
        "text_decoders",
    )
)
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# Up to version 0.2, config classes were in a module "config" of their family.
_FORMERLY = re.compile(r"(?<=^loongplug\.models\.)(\w+)\.config(?=\.)")


def families(trusted_packages: Sequence[str] = ()) -> dict[str, Family]:
    """All known families by name, with their parts: LoongPlug's own, then the trusted packages'.

    A package adds families by a ``LOONGPLUG_FAMILIES`` tuple at its top level, and parts for any
    family by a ``LOONGPLUG_PARTS`` tuple; one without either adds config classes only.
    """
    known: dict[str, Family] = {}
    parts: dict[str, Part] = {}
    for package in (*_BUILT_IN, *trusted_packages):
        module = _imported(package)
        new_parts = _added(module, "LOONGPLUG_PARTS", what="part", known=parts)
        parts |= new_parts
        known |= _added(module, "LOONGPLUG_FAMILIES", what="model family", known=known)
    return {name: _join(family, parts) for name, family in known.items()}


def _imported(package: str) -> Any:
    if not all(part.isidentifier() for part in package.split(".")):
        raise ValueError(
            f"--trusted-packages names {package!r}, which is not a package: give the name by "
            "which Python imports it, such as my_models"
        )
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"--trusted-packages names {package}, which cannot be imported ({error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error


def _added[Kind: (Part, Family)](
    module: Any, name: str, *, what: str, known: Mapping[str, Kind]
) -> dict[str, Kind]:
    """Parts or families that a package adds under ``name`` to those that are ``known``."""
    found: dict[str, Kind] = {}
    for each in getattr(module, name, ()):
        if each.name in known or each.name in found:
            raise ValueError(
                f"{module.__name__} adds a {what} {each.name}, a name that is taken; rename it"
            )
        found[each.name] = each
    return found


def _join(family: Family, parts: Mapping[str, Part]) -> Family:
    """The family with its parts, by the names of its modules in their order."""
    config_class = family.config_class
    modules = [module for entry in config_class.entries() for module in entry.modules]
    twice = [name for name in modules if modules.count(name) > 1]
    if twice:
        raise ValueError(f"the model family {family.name} has two modules {twice[0]!r}: rename one")
    types = typing.get_type_hints(config_class)
    joined: dict[str, tuple[Part, ...]] = {}
    for module in modules:
        found = types[config_class.keys[module]]
        if family.parts[module] == ANY:
            joined[module] = _any_for(family, module, found, parts)
        else:
            joined[module] = (_named(family, module, found, parts),)
    return replace(family, joined=joined)


def _any_for(
    family: Family, module: str, found: Any, parts: Mapping[str, Part]
) -> tuple[Part, ...]:
    """All that config.json can name, for a module whose config is a ``found``."""
    by_type: dict[str, Part] = {}
    for part in parts.values():
        if part.model_type is None or not issubclass(part.config_class, found):
            continue
        other = by_type.setdefault(part.model_type, part)
        if other is not part:
            raise ValueError(
                f"the parts {other.name!r} and {part.name!r} both have the model_type "
                f"{part.model_type!r}, and the model family {family.name} takes either as its "
                f"{module}: leave one of them out, or name the part in the family"
            )
    return tuple(by_type.values())


def _named(family: Family, module: str, found: Any, parts: Mapping[str, Part]) -> Part:
    """The one part that the family names for a module, whose config is a ``found``."""
    name = family.parts[module]
    if name not in parts:
        raise ValueError(
            f"the model family {family.name} has the part {name!r} as its {module}, which is "
            f"not registered: expected one of {', '.join(sorted(parts))}, and a trusted "
            "package can add more by LOONGPLUG_PARTS"
        )
    part = parts[name]
    if not (isinstance(found, type) and issubclass(found, part.config_class)):
        raise ValueError(
            f"the model family {family.name} has the part {name!r} as its {module}, which is "
            f"made from a {part.config_class.__name__}, but its {family.config_class.__name__} has "
            f"a {getattr(found, '__name__', found)} there: take the part of that class"
        )
    return part


def family_of(model: object, *, trusted_packages: Sequence[str] = ()) -> Family:
    """The family of a model's config (or config class); a derived class counts as its base."""
    by_class = {family.config_class: family for family in families(trusted_packages).values()}
    config_class = model if isinstance(model, type) else type(model)
    for base in config_class.__mro__:
        if base in by_class:
            return by_class[base]
    wanted = ", ".join(dotted(each) for each in by_class)
    raise ValueError(
        f"{dotted(config_class)} describes no known model family; a model's _target_ is one of "
        f"{wanted}"
    )


def trusted_object(name: str, *, packages: Sequence[str], cure: str) -> object:
    """The object called ``package.module.name``; only ``packages`` are imported."""
    name = present_name(name)
    if _DOTTED_NAME.fullmatch(name) is None or not within(name, packages):
        where = f"is not in {' or '.join(packages)}" if packages else "is in no trusted package"
        raise ValueError(f"{name} {where}; {cure}")
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} does not exist ({error})") from error


def present_name(name: str) -> str:
    """The dotted name that a config class has today."""
    return _FORMERLY.sub(r"\1", name)


def within(name: str, packages: Sequence[str]) -> bool:
    """Whether a dotted name is of something below one of the packages."""
    return any(name.startswith(f"{package}.") for package in packages)
