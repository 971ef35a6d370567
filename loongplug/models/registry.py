"""The model families and parts LoongPlug knows, and how a package outside it adds its own."""

import functools
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loongplug.models.architecture import HEAD, SECTIONS, MultimodalArchitecture
from loongplug.models.entries import only_decoder
from loongplug.models.parts import ArchitectureArgument, DecoderPart, Part, load

if TYPE_CHECKING:
    from loongplug.models.hf_model import HuggingFaceModel


# The special tokens of Qwen's vision-language models, by the config's fields for their ids.
QWEN_VISION_TOKENS = MappingProxyType(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
)


# In a family's parts: any registered part that fits and that config.json can name.
ANY = "any"
# Among the sections of a config.json: what stands at its top, beside all of them.
WHOLE = ""


@dataclass(frozen=True, kw_only=True)
class InTransformers:
    """What a family is to ``transformers``.

    ``config_class`` is a name in ``transformers``, or ``module:name`` for a class from elsewhere;
    None where there is none, and so no export. ``architecture`` is the name of the model's class.
    ``roots`` has, by a module's name, how the names of its tensors begin in the files, and
    ``sections``, by a section of config.json or
    :data:`WHOLE`, the modules that it describes. ``whole`` has, by a module's name, which fields of
    its config stand at the top although a section describes it, each with its key, and ``more``, a
    function's name as "module:function", gives what else stands there for a config. ``derived``
    names one that gives, of a config.json, fields without a key of their own by the names of
    modules. ``head`` is the name of the decoder's output layer in the files. ``prefixes`` are
    beginnings of names in the files, each with what the model itself has there; the first that fits
    counts. ``formerly`` are beginnings of names that other versions have written, each with the
    present one. ``within`` has, by the ``model_type`` of larger models that this one is a part of,
    the section of their config.json that is this one's, and ``aside`` beginnings of the names that
    their other tensors have. Without ``ties``, its output layer never has the embeddings' weight,
    whatever config.json says.
    """

    config_class: str | None
    architecture: str
    roots: Mapping[str, str]
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SECTIONS)
    whole: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    more: str | None = None
    derived: str | None = None
    head: str = HEAD
    prefixes: tuple[tuple[str, str], ...] = ()
    formerly: tuple[tuple[str, str], ...] = ()
    within: Mapping[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()
    ties: bool = True


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: which parts it joins, and what it is called elsewhere. All of it is data.

    ``config_class`` is the frozen dataclass that the family's YAML files fill; ``parts`` has, by
    the names of the built model's modules, those of registered parts, or :data:`ANY`; what may
    stand there, :func:`families` puts into ``joined``. ``configs`` is the folder of the YAML files;
    None stands for ``configs/models/<name>`` of LoongPlug.
    """

    name: str
    config_class: type[MultimodalArchitecture]
    parts: Mapping[str, str]
    in_transformers: InTransformers
    special_tokens: Mapping[str, str]  # config field -> the token's text
    marks: Mapping[str, str] = field(default_factory=dict)
    configs: Path | None = None
    joined: Mapping[str, tuple[Part, ...]] = field(default_factory=dict, repr=False)

    def parts_of(self, config: MultimodalArchitecture) -> dict[str, Part]:
        """The parts of ``config``'s model by the names of its modules: those of their configs.

        Raises:
            ValueError: a module's config is of no part that the family takes there.
        """
        return {
            name: _part_of(architecture, self.joined[name], family=self.name, module=name)
            for name, architecture in config.modules().items()
        }

    def load_builder(self, config: MultimodalArchitecture) -> Callable[..., Any]:
        """:func:`~loongplug.models.stage.build_model` with the parts of ``config``'s model."""
        parts = self.parts_of(config)
        for part in parts.values():
            load(part.build)
        return functools.partial(load("loongplug.models.stage:build_model"), parts)

    def megatron_arguments(self, config: MultimodalArchitecture) -> dict[str, ArchitectureArgument]:
        """Megatron's architecture arguments for ``config``, by their names in its namespace."""
        name = only_decoder(config.entries()).name
        part = self.parts_of(config)[name]
        assert isinstance(part, DecoderPart)
        return part.arguments(config.foundation, key=config.keys[name])

    def load_hugging_face(self, config: MultimodalArchitecture) -> "HuggingFaceModel":
        """The tensors and the config.json of ``config``'s model in ``transformers``."""
        model: HuggingFaceModel = load("loongplug.models.hf_model:describe")(self, config)
        return model


def _built_in() -> Iterator[str]:
    """The packages here that have families: those with config classes."""
    for folder in sorted(Path(__file__).parent.iterdir()):
        if (folder / "config.py").is_file():
            yield f"{__package__}.{folder.name}"


def families(trusted_packages: Sequence[str] = ()) -> dict[str, Family]:
    """All known families by name, with their parts: LoongPlug's own, then the trusted packages'.

    A package adds families by a ``LOONGPLUG_FAMILIES`` tuple at its top level, and parts for any
    family by a ``LOONGPLUG_PARTS`` tuple; one without either adds config classes only.

    Raises:
        ValueError: a trusted package cannot be imported, gives a name that is taken, or what is
            no such tuple; or a family's modules are not those of its parts.
    """
    known: dict[str, Family] = {}
    parts: dict[str, Part] = {}
    for package in (*_built_in(), *trusted_packages):
        module = _imported(package)
        new_parts = _added(module, "LOONGPLUG_PARTS", Part, what="part", known=parts)
        parts |= new_parts
        known |= _added(module, "LOONGPLUG_FAMILIES", Family, what="model family", known=known)
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
    module: Any, name: str, kind: type[Kind], *, what: str, known: Mapping[str, Kind]
) -> dict[str, Kind]:
    """What a package adds under ``name`` to those that are ``known``."""
    added = getattr(module, name, ())
    if not isinstance(added, tuple) or not all(isinstance(each, kind) for each in added):
        raise ValueError(
            f"{module.__name__}.{name} is {added!r}, but a tuple of "
            f"{kind.__module__}.{kind.__qualname__} is expected"
        )
    found: dict[str, Kind] = {}
    for each in added:
        if each.name in known or each.name in found:
            raise ValueError(
                f"{module.__name__} adds a {what} {each.name}, a name that is taken; rename it"
            )
        found[each.name] = each
    return found


def _part_of(architecture: object, parts: Sequence[Part], *, family: str, module: str) -> Part:
    """The part that is made from configs of this class, or of the closest base of it."""
    by_class = {part.config_class: part for part in parts}
    for base in type(architecture).__mro__:
        if base in by_class:
            return by_class[base]
    raise ValueError(
        f"the model family {family} has a {dotted(type(architecture))} as its {module}, of which "
        f"no part is made: expected one of {', '.join(dotted(each) for each in by_class)}"
    )


def _join(family: Family, parts: Mapping[str, Part]) -> Family:
    """The family with its parts, by the names of its modules in their order."""
    config_class = family.config_class
    entries = config_class.entries()
    modules = [module for entry in entries for module in entry.modules]
    if set(family.parts) != set(modules):
        raise ValueError(
            f"the model family {family.name} has parts for {', '.join(family.parts)}, but the "
            f"modules of its {config_class.__name__} are {', '.join(modules)}: name a part for each"
        )
    outside = family.in_transformers
    described = {module for members in outside.sections.values() for module in members}
    for what, named in (
        ("roots", set(outside.roots)),
        ("sections", described),
        ("whole", set(outside.whole)),
    ):
        if named - set(modules) or (what == "roots" and named != set(modules)):
            raise ValueError(
                f"in_transformers of the model family {family.name} has {what} for "
                f"{', '.join(sorted(named))}, but the modules of its {config_class.__name__} are "
                f"{', '.join(modules)}"
            )
    types = typing.get_type_hints(config_class)
    decoder = only_decoder(entries).name
    joined: dict[str, tuple[Part, ...]] = {}
    for module in modules:
        found = types[config_class.keys[module]]
        name = family.parts[module]
        takes = (
            _any_for(family, module, found, parts)
            if name == ANY
            else (_named(family, module, found, parts),)
        )
        if module == decoder and not all(isinstance(part, DecoderPart) for part in takes):
            raise ValueError(
                f"the model family {family.name} has the part {name!r} as its {decoder}, which is "
                f"not a {DecoderPart.__name__}: expected a part that is"
            )
        joined[module] = takes
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
    """The family of a model's config (or config class); a derived class counts as its base.

    Raises:
        ValueError: no family has such configs.
    """
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


def dotted(config_class: type) -> str:
    """A class by the name that YAML's ``_target_`` has."""
    return f"{config_class.__module__}.{config_class.__qualname__}"
