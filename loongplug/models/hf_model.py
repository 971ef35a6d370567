"""A model as Hugging Face knows it: its tensors, and its ``config.json``."""

import importlib
import json
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.entries import only_decoder, only_encoder
from loongplug.models.hf_mapping import Mapping, Row
from loongplug.models.parts import load
from loongplug.models.registry import Family, InTransformers

# What config.json may say otherwise without changing what the weights mean.
_WITHOUT_INFLUENCE = ("initializer_range", "max_position_embeddings", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class HuggingFacePart:
    """What one module is to ``transformers``.

    ``values`` are its own of config.json; ``twins`` are tensors that some files have twice, each
    with the name that counts. ``inexpressible`` and ``unread`` as in :class:`HuggingFaceModel`.
    """

    rows: Sequence[Row]
    values: Dictionary[str, Any]
    twins: Dictionary[str, str] = field(default_factory=dict)
    inexpressible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What a family says of one of its models to the outside; all of it data.

    ``sections`` are config.json's nested parts (``text_config`` and so on), ``top`` its values
    beside them.
    ``inexpressible`` says, in one sentence each, what of the model transformers has no words for;
    ``unread`` likewise what transformers would leave aside in a folder that has it, so that only
    this package can read the model.
    """

    mapping: Mapping
    in_transformers: InTransformers
    sections: Dictionary[str, Dictionary[str, Any]]
    top: Dictionary[str, Any]
    inexpressible: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def module_name(self, tensor: str) -> str:
        """The name in ``transformers``' model of what the files call ``tensor``, its weight."""
        name = tensor.removesuffix(".weight")
        for theirs, loaded in self.in_transformers.prefixes:
            if name.startswith(theirs):
                return loaded + name.removeprefix(theirs)
        return name


def describe(family: Family, config: VisionLanguageArchitecture) -> HuggingFaceModel:
    """The tensors and the config.json of ``config``'s model."""
    theirs = family.in_transformers
    modules = _modules(family, config)
    return HuggingFaceModel(
        mapping=Mapping(
            [row for module in modules.values() for row in module.rows],
            twins={name: twin for each in modules.values() for name, twin in each.twins.items()},
        ),
        in_transformers=theirs,
        sections={
            section: {key: value for name in names for key, value in modules[name].values.items()}
            for section, names in theirs.sections.items()
        },
        top={name: getattr(config, name) for name in family.special_tokens}
        | {"tie_word_embeddings": config.foundation.tie_word_embeddings},
        inexpressible=tuple(line for each in modules.values() for line in each.inexpressible),
        unread=tuple(line for each in modules.values() for line in each.unread),
    )


def _modules(family: Family, config: VisionLanguageArchitecture) -> dict[str, HuggingFacePart]:
    """What the parts say, by the modules' names."""
    entries, architectures = config.entries(), config.modules()
    encoder, projector = only_encoder(entries).modules
    decoder = only_decoder(entries).name

    def ask(name: str, **neighbours: Any) -> HuggingFacePart:
        part: HuggingFacePart = load(family.joined[name].hugging_face)(
            architectures[name],
            ours=name,
            theirs=family.in_transformers.roots[name],
            **neighbours,
        )
        return part

    return {
        encoder: ask(encoder),
        projector: ask(projector, vision=architectures[encoder], out=config.foundation.hidden_size),
        decoder: ask(decoder),
    }


def check_all_is_read(model: HuggingFaceModel) -> None:
    """Raise ValueError where transformers would leave some of the model's tensors aside."""
    if model.unread:
        raise ValueError("; ".join(model.unread))


def hf_config(model: HuggingFaceModel) -> Any:
    """The same architecture as a config of ``transformers`` (without dtype).

    The ids of the special tokens must be known: from the YAML or from the tokenizer.

    Raises:
        ValueError: the architecture has something that ``transformers`` cannot express.
    """
    if model.inexpressible:
        raise ValueError("; ".join(model.inexpressible))
    assert None not in model.top.values(), model.top
    return _config_class(model)(
        **{name: dict(section) for name, section in model.sections.items()},
        **model.top,
        architectures=[model.in_transformers.architecture],
    )


def hf_config_differences(folder: Path, model: HuggingFaceModel) -> list[str]:
    """What ``folder``'s config.json says otherwise than ``model``, one line each.

    Tensor shapes alone do not tell, for one, the number of heads. Keys without influence on what
    the weights mean are left out. A folder without config.json has nothing to compare.
    """
    path = folder / "config.json"
    if not path.is_file():
        return []
    expected_class = _config_class(model)
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError, RecursionError):
        return ["config.json is not a JSON object; copy the file again"]
    if kind != expected_class.model_type:
        return [f"config.json has model_type {kind!r}, expected {expected_class.model_type!r}"]
    try:
        found = expected_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers has many for a value of the wrong kind
        reason = " ".join(str(error).split())
        name = expected_class.__name__
        return [f"config.json is not a {name} ({reason:.300}); copy the file again"]
    differences: list[str] = []
    for section, values in model.sections.items():
        for key, value in values.items():
            if key in _WITHOUT_INFLUENCE:
                continue
            other = getattr(getattr(found, section), key)
            if key == "rope_parameters":
                other = {name: other.get(name, value[name]) for name in value}
            if isinstance(value, list):
                other = list(other)
            if other != value:
                differences.append(f"config.json has {section}.{key} {other}, expected {value}")
    tied = model.top["tie_word_embeddings"]
    if found.tie_word_embeddings != tied:
        differences.append(
            f"config.json has tie_word_embeddings {found.tie_word_embeddings}, expected {tied}"
        )
    return differences


def _config_class(model: HuggingFaceModel) -> Any:
    module, _, name = model.in_transformers.config_class.rpartition(":")
    package = module or "transformers"
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{package} has no config class {name}, which the model's family names ({error}): "
            f"install a version of {package.partition('.')[0]} that has it, or correct the family."
        ) from error
