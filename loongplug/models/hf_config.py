"""A model's ``config.json``: written from a model, compared with one, and read into its YAML."""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loongplug.models.entries import only_decoder
from loongplug.models.family import ANY, WHOLE, Family, HuggingFaceModel, InTransformers
from loongplug.models.parts import ANY_TYPE, Part, dotted, load
from loongplug.models.registry import families

CONFIG_JSON = "config.json"
# Names of options by which something is computed, and what they say where nothing is.
_OPTION = re.compile("drop|softcap|_multiplier$|logits?_scal|attn_scalar$")
_NEUTRAL = (None, 0, 1)
_INSTEAD = "so it has no Hugging Face folder: --save DIR keeps it, in a checkpoint for any layout"
# What it may say otherwise without changing what the weights mean.
_WITHOUT_INFLUENCE = ("initializer_range", "max_position_embeddings", "tie_word_embeddings")


def hf_config(model: HuggingFaceModel) -> Any:
    """The model's architecture as a config of ``transformers`` (without dtype).

    The ids of the special tokens must be known: from the YAML or from the tokenizer.
    """
    if model.inexpressible:
        raise ValueError("; ".join(model.inexpressible))
    assert None not in model.top.values(), model.top
    config_class = _config_class(model.in_transformers)
    try:
        return config_class(
            **{name: dict(section) for name, section in model.sections.items()},
            **model.top,
            **model.whole,
            architectures=[model.in_transformers.architecture],
        )
    except Exception as error:  # transformers has many for what it does not know
        reason = f"{config_class.__name__}: {error}".partition(". ")[0]
        raise ValueError(f"transformers has no such model ({reason:.200}), {_INSTEAD}") from error


def hf_config_differences(
    folder: Path, model: HuggingFaceModel, *, alone: bool = False
) -> list[str]:
    """Differences of ``folder``'s config.json from ``model``, one line each.

    Tensor shapes alone do not tell, for one, the number of heads. Keys without influence on what
    the weights mean are left out. A folder without config.json has nothing to compare. With
    ``alone``, the config of a larger model that has this one as a part is another's.
    """
    if not (folder / CONFIG_JSON).is_file():
        return []
    theirs = model.in_transformers
    try:
        expected = _config_class(theirs).model_type
        kind = _content(folder).get("model_type")
        if kind != expected and (alone or kind not in theirs.within):
            return [f"{CONFIG_JSON} has model_type {kind!r}, expected {expected!r}"]
        found = _read(folder, theirs)
    except ValueError as error:
        return [str(error)]
    differences = [*model.inexpressible, *_options(found, model.whole, name="")]
    for section, values in model.sections.items():
        differences += _options(getattr(found, section), values, name=f"{section}.")
        for key, value in values.items():
            if key in (*_WITHOUT_INFLUENCE, *model.unused.get(section, ())):
                continue
            other: Any = getattr(getattr(found, section), key, None)
            if key == "rope_parameters":
                value = {"partial_rotary_factor": 1.0, **value}
                unsaid = {**value, "rope_type": None}  # standing for one by layers, which has none
                other = {name: other.get(name, unsaid[name]) for name in value}
            if isinstance(value, list):
                other = list(other)
            if other != value:
                differences.append(f"{CONFIG_JSON} has {section}.{key} {other}, expected {value}")
    for key, value in model.whole.items():
        if (other := getattr(found, key)) != value:
            differences.append(f"{CONFIG_JSON} has {key} {other}, expected {value}")
    tied, other = model.top["tie_word_embeddings"], _tied(found, theirs)
    if other != tied:
        differences.append(f"{CONFIG_JSON} has tie_word_embeddings {other}, expected {tied}")
    return differences


def _options(section: Any, known: Mapping[str, Any], *, name: str) -> list[str]:
    """A line for each option of a section of config.json that no part reads and that counts."""
    return [
        f"{CONFIG_JSON} has {name}{key} {value}, which LoongPlug's model does not have"
        for key, value in section.to_dict().items()
        if _OPTION.search(key) and key not in known and value not in _NEUTRAL
    ]


def _tied(found: Any, theirs: InTransformers) -> bool:
    """Whether transformers gives the output layer the embeddings' weight."""
    return theirs.ties and found.tie_word_embeddings


def _config_class(theirs: InTransformers) -> Any:
    if theirs.config_class is None:
        raise ValueError(f"transformers has no {theirs.architecture}, {_INSTEAD}")
    module, _, name = theirs.config_class.rpartition(":")
    package = module or "transformers"
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{package} has no config class {name}, which the model's family names ({error}): "
            f"install a version of {package.partition('.')[0]} that has it, or correct the family."
        ) from error


def _content(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises ValueError where it is not one."""
    try:
        content = json.loads((folder / CONFIG_JSON).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{folder / CONFIG_JSON} is not a JSON object; copy the file again")
    return content


def _read(folder: Path, theirs: InTransformers) -> Any:
    """The folder's config.json as transformers has it, with its defaults.

    Of a larger model that has this one as a part, the part.
    """
    content, config_class = _content(folder), _config_class(theirs)
    try:
        section = theirs.within.get(str(content.get("model_type")))
        if section is not None:
            return config_class.from_dict(content[section])
        return config_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers has many for a value of the wrong kind
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder / CONFIG_JSON} is not a {config_class.__name__} ({reason:.300}); copy the "
            "file again"
        ) from error


def family_of_folder(folder: Path, *, trusted_packages: Sequence[str] = ()) -> Family:
    """The family whose models have the ``model_type`` of a folder's config.json."""
    if not (folder / CONFIG_JSON).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG_JSON}, which says what model it has: give the folder of a "
            "Hugging Face model, or name the model by --model-name NAME or --config-file PATH"
        )
    known: dict[str, Family] = {}
    for family in families(trusted_packages).values():
        theirs = family.in_transformers
        if theirs.config_class is None:
            continue
        for model_type in (_config_class(theirs).model_type, *theirs.within):
            known.setdefault(model_type, family)
    kind = _content(folder).get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"{folder / CONFIG_JSON} has model_type {kind!r}, which LoongPlug does not train: "
            f"expected one of {', '.join(sorted(known))}, or a family of one of --trusted-packages"
        )
    return known[kind]


def read_folder(folder: Path, family: Family) -> dict[str, Any]:
    """The YAML data of the model that a folder's config.json describes, ``_target_`` included.

    What config.json has no key for is left to the defaults of the family's config classes.
    """
    found = _read(folder, family.in_transformers)
    try:
        return _data(found, family)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _data(found: Any, family: Family) -> dict[str, Any]:
    """The YAML data of what transformers has read."""
    theirs, config_class = family.in_transformers, family.config_class
    data: dict[str, Any] = {"_target_": dotted(config_class)}
    keys = config_class.keys
    for section, modules in theirs.sections.items():
        for module in modules:
            of_module = found if section == WHOLE else getattr(found, section)
            part = _part_in(family, module, section, of_module)
            data[keys[module]] = {"_target_": dotted(part.config_class)} | _fields(part, of_module)
    for module, outside in theirs.whole.items():
        fields = data.setdefault(keys[module], {})
        fields |= {name: getattr(found, key) for name, key in outside.items()}
    if theirs.derived is not None:
        for module, outside in _derived(theirs.derived, found).items():
            data[keys[module]] |= outside
    decoder = config_class.keys[only_decoder(config_class.entries()).name]
    data[decoder]["tie_word_embeddings"] = _tied(found, theirs)
    return data | {name: getattr(found, name) for name in family.special_tokens}


def _part_in(family: Family, module: str, section: str, found: Any) -> Part:
    """The part that a section of config.json describes."""
    parts = family.joined[module]
    if family.parts[module] != ANY:
        return parts[0]
    by_type = {part.model_type: part for part in parts}
    fallback = by_type.pop(ANY_TYPE, None)
    part = by_type.get(found.model_type, fallback)
    if part is None:
        raise ValueError(
            f"{CONFIG_JSON} has {section}.model_type {found.model_type!r}, of which LoongPlug has "
            f"no part: expected one of {', '.join(sorted(filter(None, by_type)))}"
        )
    return part


def _fields(part: Part, section: Any) -> dict[str, Any]:
    """The fields of a part's config that a section of config.json has keys for."""
    fields = {}
    for name, key in part.config_json.items():
        outer, _, inner = key.rpartition(".")
        value = getattr(section, outer).get(inner) if outer else getattr(section, inner, None)
        _check_plain(value, key=key)
        if value is not None:
            fields[name] = value
    derived = _derived(part.derived, section) if part.derived else {}
    for name, value in derived.items():
        _check_plain(value, key=name)
    return fields | derived


def _check_plain(value: object, *, key: str) -> None:
    if "${" in str(value):
        raise ValueError(
            f"{CONFIG_JSON} has {key} {value!r:.200}, which YAML would fill in: expected plain "
            "values"
        )


def _derived(function: str, section: Any) -> Any:
    """Fields that ``function`` makes of a section of config.json, or of the whole."""
    try:
        return load(function)(section)
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{CONFIG_JSON} has values that {function} cannot use ({error}); correct them"
        ) from error
