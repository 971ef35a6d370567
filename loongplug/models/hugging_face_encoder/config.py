"""Architecture of an encoder that ``transformers`` computes, as a config.json has it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from loongplug.models.architecture import SquareVisionArchitecture
from loongplug.models.lora.settings import LoraSettings

if TYPE_CHECKING:
    from loongplug.models.hugging_face_encoder.towers import Tower


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
        """The same as a config of ``transformers``.

        Raises:
            ValueError: it has no such kind, or no such settings of it.
        """
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
    def tower(self) -> "Tower":
        """What the encoder is made of.

        Raises:
            ValueError: it is none that can be taken.
        """
        from loongplug.models.hugging_face_encoder.towers import look_at

        kind = json.dumps(self.settings, sort_keys=True)
        return look_at(self.model_type, kind, feature_layer=self.feature_layer)

    def has_class_token(self) -> bool:
        """As the tower gives one state more than there are patches."""
        return self.tower.class_token


def setting_names(config_class: Any) -> frozenset[str]:
    """What a kind of config itself has, without what every kind has."""
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
