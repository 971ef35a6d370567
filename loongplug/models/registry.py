"""The model families LoongPlug knows, and how a package outside it adds one."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loongplug.models.hf_model import HuggingFaceModel


@dataclass(frozen=True, kw_only=True)
class ArchitectureArgument:
    """The value of one Megatron argument that the model's YAML decides.

    ``key`` is the YAML key, below ``model``, that an override would set; None where the family
    fixes the value.
    """

    value: object
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. What is heavy to import is named as ``"module:attribute"``.

    ``config_class`` names the frozen dataclass that the family's YAML files fill; ``builder`` the
    function that builds one pipeline stage; ``arguments`` the function from such a config to the
    Megatron arguments it decides, by their names in Megatron's namespace; ``hugging_face`` the
    one from a config to its :class:`~loongplug.models.hf_model.HuggingFaceModel`. ``configs`` is
    the folder of the family's YAML files; None stands for ``configs/models/<name>`` of LoongPlug.
    """

    name: str
    model_type: str  # Hugging Face's name for it
    config_class: str
    builder: str
    arguments: str
    hugging_face: str
    special_tokens: Mapping[str, str]  # config field -> the token's text
    configs: Path | None = None

    def load_config_class(self) -> type:
        """The dataclass of the family's configs."""
        return _load(self.config_class)

    def load_builder(self) -> Callable[..., Any]:
        """The function that builds one pipeline stage."""
        return _load(self.builder)

    def megatron_arguments(self, config: object) -> dict[str, ArchitectureArgument]:
        """Megatron's architecture arguments for ``config``, by their names in its namespace."""
        return _load(self.arguments)(config)

    def load_hugging_face(self, config: object) -> "HuggingFaceModel":
        """The tensors and the config.json of ``config``'s model in ``transformers``."""
        model: HuggingFaceModel = _load(self.hugging_face)(config)
        return model


# The special tokens of Qwen's vision-language models, by the config's fields for their ids.
QWEN_VISION_TOKENS = MappingProxyType(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
)


def _built_in() -> Iterator[Family]:
    """The family of each folder here that has a ``family.py`` with a ``FAMILY``."""
    for folder in sorted(Path(__file__).parent.iterdir()):
        if (folder / "family.py").is_file():
            module = importlib.import_module(f"{__package__}.{folder.name}.family")
            yield module.FAMILY


def families(trusted_packages: Sequence[str] = ()) -> dict[str, Family]:
    """All known families by name: LoongPlug's own, then those of the trusted packages.

    A trusted package adds families by a ``LOONGPLUG_FAMILIES`` tuple at its top level; one without
    it adds config classes only.

    Raises:
        ValueError: a trusted package cannot be imported, gives a name that is taken, or what is
            no tuple of families.
    """
    known = {family.name: family for family in _built_in()}
    for package in trusted_packages:
        if not all(part.isidentifier() for part in package.split(".")):
            raise ValueError(
                f"--trusted-packages names {package!r}, which is no package: give the name by "
                "which Python imports it, such as my_models"
            )
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"--trusted-packages names {package}, which cannot be imported ({error}); "
                "install it or put its folder on PYTHONPATH"
            ) from error
        added = getattr(module, "LOONGPLUG_FAMILIES", ())
        if not isinstance(added, tuple) or not all(isinstance(each, Family) for each in added):
            raise ValueError(
                f"{package}.LOONGPLUG_FAMILIES is {added!r}, but a tuple of "
                f"{Family.__module__}.{Family.__qualname__} is expected"
            )
        for family in added:
            if family.name in known:
                raise ValueError(
                    f"{package} adds a model family {family.name}, a name that is taken; rename it"
                )
            known[family.name] = family
    return known


def find_family(name: str, *, trusted_packages: Sequence[str] = ()) -> Family:
    """The family called ``name``.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    known = families(trusted_packages)
    if name not in known:
        raise ValueError(
            f"there is no model family {name}; known are {', '.join(known)}, and "
            "--trusted-packages can add more"
        )
    return known[name]


def family_of(model: object, *, trusted_packages: Sequence[str] = ()) -> Family:
    """The family of a model's config (or config class); a derived class counts as its base.

    Raises:
        ValueError: no family has such configs.
    """
    known = families(trusted_packages)
    by_class = {family.load_config_class(): family for family in known.values()}
    config_class = model if isinstance(model, type) else type(model)
    for base in config_class.__mro__:
        if base in by_class:
            return by_class[base]
    wanted = ", ".join(family.config_class.replace(":", ".") for family in known.values())
    raise ValueError(
        f"{config_class.__module__}.{config_class.__qualname__} describes no known model family; "
        f"a model's _target_ is one of {wanted}"
    )


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path}, which a model family names, cannot be loaded ({error}); it is written "
            "module:attribute"
        ) from error
