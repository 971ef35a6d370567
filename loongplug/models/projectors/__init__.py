"""Projectors that stand behind any encoder: a linear, or an MLP with or without merging before."""

from loongplug.models.parts import Part
from loongplug.models.projectors.config import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)

_MODULES = "loongplug.models.projectors.modules"
_HF = "loongplug.models.projectors.hf"
_ACTIVATION = {"activation": "projector_hidden_act"}
_BIAS = {"bias": "multimodal_projector_bias"}

# Their keys of config.json stand at its top, beside the sections.
LOONGPLUG_PARTS = (
    Part(
        name="linear",
        config_class=LinearConfig,
        build=f"{_MODULES}:build_linear",
        hugging_face=f"{_HF}:one_linear",
    ),
    Part(
        name="mlp",
        config_class=MlpConfig,
        build=f"{_MODULES}:build_mlp",
        hugging_face=f"{_HF}:mlp",
        config_json=_ACTIVATION | _BIAS,
    ),
    Part(
        name="pixel_shuffle",
        config_class=PixelShuffleConfig,
        build=f"{_MODULES}:build_pixel_shuffle",
        hugging_face=f"{_HF}:pixel_shuffle",
        config_json=_ACTIVATION,
    ),
    Part(
        name="average_pool",
        config_class=AveragePoolConfig,
        build=f"{_MODULES}:build_average_pool",
        hugging_face=f"{_HF}:average_pool",
        config_json=_ACTIVATION | _BIAS,
    ),
)
