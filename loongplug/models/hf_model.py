"""A model as Hugging Face knows it: its tensors, and its values of ``config.json``."""

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loongplug.models.architecture import ModuleArchitecture, MultimodalArchitecture
from loongplug.models.entries import encoders, only_decoder
from loongplug.models.hf_mapping import Mapping, Row
from loongplug.models.parts import ANY_TYPE, Part, load
from loongplug.models.registry import WHOLE, Family, InTransformers


@dataclass(frozen=True, kw_only=True)
class HuggingFacePart:
    """What one module is to ``transformers``.

    ``values`` are those of config.json that no field of its config has a key for (the part's
    ``config_json`` has the others); ``twins`` are tensors that some files have twice, each with the
    name that counts. ``inexpressible`` and ``unread`` as in :class:`HuggingFaceModel`.
    """

    rows: Sequence[Row]
    values: Dictionary[str, Any] = field(default_factory=dict)
    twins: Dictionary[str, str] = field(default_factory=dict)
    inexpressible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What a family says of one of its models to the outside; all of it data.

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


def describe(family: Family, config: MultimodalArchitecture) -> HuggingFaceModel:
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
    """What the parts say, by the modules' names."""
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
