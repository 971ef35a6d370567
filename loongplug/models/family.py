"""A model family: the parts that it joins, and what its models are to ``transformers``."""

import functools
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loongplug.data.folder_files import QWEN_VISION_TOKENS as QWEN_VISION_TOKENS
from loongplug.models.architecture import (
    SECTIONS,
    EncoderArchitecture,
    ModuleArchitecture,
    MultimodalArchitecture,
    ProjectorArchitecture,
)
from loongplug.models.entries import encoders, only_decoder
from loongplug.models.hf_mapping import HEAD, Mapping, Row
from loongplug.models.parts import ANY_TYPE, ArchitectureArgument, DecoderPart, Part, dotted, load

# In a family's parts: any registered part that fits and that config.json can name.
ANY = "any"
# Among the sections of a config.json: what stands at its top, beside all of them.
WHOLE = ""


@dataclass(frozen=True, kw_only=True)
class InTransformers:
    """Names by which ``transformers`` and its files know a family.

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
    roots: Dictionary[str, str]
    sections: Dictionary[str, tuple[str, ...]] = SECTIONS
    whole: Dictionary[str, Dictionary[str, str]] = field(default_factory=dict)
    more: str | None = None
    derived: str | None = None
    head: str = HEAD
    prefixes: tuple[tuple[str, str], ...] = ()
    formerly: tuple[tuple[str, str], ...] = ()
    within: Dictionary[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()
    ties: bool = True


@dataclass(frozen=True, kw_only=True)
class HuggingFacePart:
    """The tensors of one module in files, and its values of config.json.

    ``values`` are those of config.json that no field of its config has a key for (the part's
    ``config_json`` has the others); ``twins`` are tensors that some files have twice, each with the
    name that counts. ``inexpressible`` and ``unread`` as in :class:`HuggingFaceModel`.
    """

    rows: Sequence[Row]
    values: Dictionary[str, Any] = field(default_factory=dict)
    twins: Dictionary[str, str] = field(default_factory=dict)
    inexpressible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def fixed_epsilon(
    module: EncoderArchitecture | ProjectorArchitecture,
    *,
    ours: str,
    theirs: float = 1e-6,
) -> tuple[str, ...]:
    """The sentence for a norm's epsilon that transformers has no key for; none where it is its."""
    if module.layernorm_epsilon == theirs:
        return ()
    return (
        f"{ours}.layernorm_epsilon is {module.layernorm_epsilon}, but transformers' model "
        f"has {theirs} there; only a model with that value can be exchanged with it",
    )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model of a family as ``transformers`` and its files know it; all of it data.

    ``sections`` are config.json's nested parts (``text_config`` and so on), ``top`` the ids of
    special tokens and the like beside them, ``whole`` what else of the architecture stands there;
    ``unused``, by a section, its keys that nothing is computed from.
    ``inexpressible`` says, in one sentence each, what of the model transformers has no words for;
    ``unread`` likewise what transformers would leave aside in a folder that has it, so that only
    this package can read the model.
    """

    mapping: Mapping
    in_transformers: InTransformers
    sections: Dictionary[str, Dictionary[str, Any]]
    top: Dictionary[str, Any]
    whole: Dictionary[str, Any] = field(default_factory=dict)
    unused: Dictionary[str, frozenset[str]] = field(default_factory=dict)
    inexpressible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def module_name(self, tensor: str) -> str:
        """The name in ``transformers``' model of what the files call ``tensor``, its weight."""
        name = tensor.removesuffix(".weight")
        for theirs, loaded in self.in_transformers.prefixes:
            if name.startswith(theirs):
                return loaded + name.removeprefix(theirs)
        return name


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: which parts it joins, and what it is called elsewhere. All of it is data.

    ``config_class`` is the frozen dataclass that the family's YAML files fill; ``parts`` has, by
    the names of the built model's modules, those of registered parts, or :data:`ANY`; what may
    stand there, :func:`loongplug.models.registry.families` puts into ``joined``. ``configs`` is the
    folder of the YAML files; None stands for ``configs/models/<name>`` of LoongPlug.
    """

    name: str
    config_class: type[MultimodalArchitecture]
    parts: Dictionary[str, str]
    in_transformers: InTransformers
    special_tokens: Dictionary[str, str]  # config field -> the token's text
    marks: Dictionary[str, str] = field(default_factory=dict)
    configs: Path | None = None
    joined: Dictionary[str, tuple[Part, ...]] = field(default_factory=dict, repr=False)

    def parts_of(self, config: MultimodalArchitecture) -> dict[str, Part]:
        """The parts of ``config``'s model by the names of its modules: those of their configs."""
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

    def load_hugging_face(self, config: MultimodalArchitecture) -> HuggingFaceModel:
        """The tensors and the config.json of ``config``'s model in ``transformers``."""
        return _describe(self, config)


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


def _describe(family: Family, config: MultimodalArchitecture) -> HuggingFaceModel:
    """The tensors and the config.json of ``config``'s model."""
    theirs = family.in_transformers
    parts = family.parts_of(config)
    modules = _modules(family, config, parts)
    return HuggingFaceModel(
        mapping=Mapping(
            [row for module in modules.values() for row in module.rows],
            twins={name: twin for each in modules.values() for name, twin in each.twins.items()},
        ),
        in_transformers=theirs,
        sections={
            section: {key: value for name in names for key, value in modules[name].values.items()}
            for section, names in theirs.sections.items()
            if section != WHOLE
        },
        unused={
            section: frozenset(key for name in names for key in parts[name].unused)
            for section, names in theirs.sections.items()
        },
        top={name: getattr(config, name) for name in family.special_tokens}
        | {"tie_word_embeddings": config.foundation.tie_word_embeddings},
        whole={
            key: value
            for name in theirs.sections.get(WHOLE, ())
            for key, value in modules[name].values.items()
        }
        | {
            key: getattr(config.modules()[name], field)
            for name, keys in theirs.whole.items()
            for field, key in keys.items()
        }
        | (load(theirs.more)(config) if theirs.more else {}),
        inexpressible=(
            *_tied_in_vain(family, config),
            *(line for each in modules.values() for line in each.inexpressible),
        ),
        unread=tuple(line for each in modules.values() for line in each.unread),
    )


def _tied_in_vain(family: Family, config: MultimodalArchitecture) -> tuple[str, ...]:
    if family.in_transformers.ties or not config.foundation.tie_word_embeddings:
        return ()
    return (
        f"tie_word_embeddings is true, but the {family.name} model of transformers has an output "
        "layer of its own: set it to false",
    )


def _modules(
    family: Family, config: MultimodalArchitecture, parts: Dictionary[str, Part]
) -> dict[str, HuggingFacePart]:
    """The parts' descriptions, by the modules' names."""
    entries, architectures = config.entries(), config.modules()
    decoder = only_decoder(entries).name

    def ask(name: str, **neighbours: Any) -> HuggingFacePart:
        part = parts[name]
        described: HuggingFacePart = load(part.hugging_face)(
            architectures[name],
            ours=name,
            theirs=family.in_transformers.roots[name],
            **neighbours,
        )
        return replace(described, values=_values(part, architectures[name], described.values))

    found: dict[str, HuggingFacePart] = {}
    for entry in encoders(entries):
        encoder, projector = entry.modules
        found[encoder] = ask(encoder)
        found[projector] = ask(
            projector, vision=architectures[encoder], out=config.foundation.hidden_size
        )
    return found | {decoder: ask(decoder, head=family.in_transformers.head)}


def _values(
    part: Part, architecture: ModuleArchitecture, more: Dictionary[str, Any]
) -> dict[str, Any]:
    """The part's of config.json: those that fields have keys for, and ``more``."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in more.items()}
    if part.model_type not in (None, ANY_TYPE):
        values["model_type"] = part.model_type
    for name, key in part.config_json.items():
        value = getattr(architecture, name)
        outer, _, inner = key.rpartition(".")
        place = values.setdefault(outer, {}) if outer else values
        place[inner] = list(value) if isinstance(value, tuple) else value
    return values


def check_all_is_read(model: HuggingFaceModel) -> None:
    """Raise ValueError where transformers would leave some of the model's tensors aside."""
    if model.unread:
        raise ValueError("; ".join(model.unread))
