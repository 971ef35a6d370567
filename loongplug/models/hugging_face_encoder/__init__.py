"""Any image encoder of the installed ``transformers``, as it is, whole on a rank and never split:
its config class, as a config.json has it, names of tensors and keys of config.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from loongplug.models.architecture import SquareVisionArchitecture
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import CARRIED, Row, Source
from loongplug.models.lora import LoraSettings
from loongplug.models.parts import ANY_TYPE, Part, load


@dataclass(frozen=True, kw_only=True)
class HuggingFaceEncoderConfig(SquareVisionArchitecture):
    """An image encoder of one of the classes of the installed ``transformers``.

    ``model_type`` and ``settings`` are what a section of config.json has: the kind, and what it
    says otherwise than the kind's defaults. All sizes follow from them. The encoder is never split
    and has no adapters.
    """

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int = field(init=False)
    hidden_size: int = field(init=False)
    ffn_hidden_size: int = field(init=False)
    num_attention_heads: int = field(init=False)
    patch_size: int = field(init=False)
    image_size: int = field(init=False)
    in_channels: int = field(init=False)
    temporal_patch_size: int = field(init=False, default=1)
    spatial_merge_size: int = field(init=False, default=1)
    layernorm_epsilon: float = field(init=False, default=1e-6)  # no norm is ours
    initializer_range: float = field(init=False, default=0.02)  # transformers starts the weights
    lora: LoraSettings | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Raises ValueError where transformers has no such kind, or a kind without such sizes."""
        found = self.in_transformers
        hidden = _size(found, "hidden_size")
        ratio = getattr(found, "mlp_ratio", 4)
        sizes = {
            "hidden_size": hidden,
            "num_layers": _size(found, "num_hidden_layers"),
            "num_attention_heads": _size(found, "num_attention_heads"),
            "ffn_hidden_size": getattr(found, "intermediate_size", None) or int(hidden * ratio),
            "patch_size": _size(found, "patch_size"),
            "image_size": _size(found, "image_size"),
            "in_channels": getattr(found, "num_channels", 3),
        }
        for name, value in sizes.items():
            object.__setattr__(self, name, value)

    @cached_property
    def in_transformers(self) -> Any:
        """The config of ``transformers`` that ``settings`` make."""
        from transformers import CONFIG_MAPPING

        if self.model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"model_type is {self.model_type!r}, which the installed transformers does not "
                "have: give that of one of its image encoders, or install a version that has it"
            )
        config_class = CONFIG_MAPPING[self.model_type]
        if unknown := sorted(self.settings.keys() - setting_names(config_class)):
            raise ValueError(
                f"settings has {', '.join(unknown)}, which {config_class.__name__} of "
                "transformers does not know: drop it, or correct its name (code that comes with a "
                "model's folder is never run)"
            )
        try:
            return config_class(**self.settings)
        except Exception as error:  # transformers has many for a value of the wrong kind
            reason = " ".join(str(error).split())
            raise ValueError(
                f"settings make no {config_class.__name__} of transformers ({reason:.300}): "
                "correct them"
            ) from error

    @cached_property
    def tower(self) -> Any:
        """The :class:`~loongplug.models.hugging_face_encoder.towers.Tower` that it is made of."""
        settings = json.dumps(self.settings, sort_keys=True)
        return _tower(self.model_type, settings, feature_layer=self.feature_layer)

    def likeness(self) -> "HuggingFaceEncoderConfig":
        """A small one of its kind."""
        small = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 2,
            "image_size": 4,
        }
        found = self.in_transformers
        known = {name: size for name, size in small.items() if hasattr(found, name)}
        return replace(self, settings={**self.settings, **known}, feature_layer=-1)

    def has_class_token(self) -> bool:
        """Whether the tower gives one state more than there are patches."""
        return self.tower.class_token


@cache
def _tower(model_type: str, settings: str, *, feature_layer: int) -> Any:
    """The tower of a kind with ``settings`` as JSON, looked at once."""
    encoder = HuggingFaceEncoderConfig(
        model_type=model_type, settings=json.loads(settings), feature_layer=feature_layer
    )
    return load("loongplug.models.hugging_face_encoder.towers:look_at")(encoder)


def setting_names(config_class: Any) -> frozenset[str]:
    """The names of settings that a kind of config has, without those of every kind."""
    from transformers import PreTrainedConfig

    everyones = {each.name for each in fields(PreTrainedConfig)}
    own = {each.name for each in fields(config_class) if not each.name.startswith("_")}
    return frozenset(own - everyones)


def _size(found: Any, name: str) -> int:
    """A size; of height and width where both are one."""
    value = getattr(found, name, None)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        value = value[0]
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{type(found).__name__} of transformers has {name} {value!r:.80}, and a whole number "
            "above 0 is expected: give an encoder of square patches in images of one size"
        )
    return value


def tensors(vision: HuggingFaceEncoderConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The encoder: each tensor of the files is a parameter, as it is.

    Carried parameters keep their places in the tower. So their first name, which is the one that
    counts, is that of carried ones everywhere, and the second says where they are.
    """
    tower = vision.tower
    rows = []
    for name, shape in tower.shapes.items():
        places: tuple[str, ...] = (f"{ours}.tower.{name}",)
        if name in tower.carried:
            places = (f"{ours}.{CARRIED}.{name}", *places)
        source = Source(f"{theirs}.{tower.in_files[name]}", shape)
        rows.append(Row(places, (source,), folded=False))
    return HuggingFacePart(rows=rows, values=_values(vision.in_transformers))


def settings_of(section: Any) -> dict[str, Any]:
    """A section of config.json: its kind, and what it says otherwise than the kind's defaults."""
    if getattr(section, "auto_map", None):
        raise ValueError(
            f"config.json has auto_map in the section of {section.model_type}: code that comes "
            "with a model's folder is never run; give a model that transformers has itself"
        )
    defaults = _values(type(section)())
    settings = {
        name: value
        for name, value in _values(section).items()
        if name != "model_type" and value != defaults[name]
    }
    return {"model_type": section.model_type, "settings": settings}


def _values(section: Any) -> dict[str, Any]:
    """The values of config.json that are the kind's own."""
    known = setting_names(type(section))
    values = {name: value for name, value in section.to_dict().items() if name in known}
    return {"model_type": section.model_type, **values}


LOONGPLUG_PARTS = (
    Part(
        name="hugging_face",
        config_class=HuggingFaceEncoderConfig,
        build="loongplug.models.hugging_face_encoder.encoder:build_encoder",
        hugging_face="loongplug.models.hugging_face_encoder:tensors",
        derived="loongplug.models.hugging_face_encoder:settings_of",
        model_type=ANY_TYPE,
    ),
)
