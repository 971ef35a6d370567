"""Projectors that stand behind any encoder, a linear, or an MLP with or without merging before:
config classes, whose sizes follow neighbours, names of tensors and keys of config.json.
"""

from dataclasses import dataclass

from loongplug.models.architecture import (
    EncoderArchitecture,
    ProjectorArchitecture,
    VisionArchitecture,
)
from loongplug.models.family import HuggingFacePart, fixed_epsilon
from loongplug.models.hf_mapping import Row, Split
from loongplug.models.hf_rows import Table
from loongplug.models.parts import Part

_LAYER_NORM_EPSILON = 1e-5  # torch's, which transformers' InternVL has


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ProjectorArchitecture):
    """Qwen2-Audio's, and Qwen2.5-Omni's of sounds: a linear of each state; each becomes a token."""


@dataclass(frozen=True, kw_only=True)
class MlpConfig(ProjectorArchitecture):
    """LLaVA's: two linears of each patch; each patch becomes a token."""

    activation: str = "gelu"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class PixelShuffleConfig(ProjectorArchitecture):
    """InternVL's: the patches of a block side by side, a LayerNorm, two linears."""

    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class AveragePoolConfig(ProjectorArchitecture):
    """The mean of a block's patches, two linears."""

    activation: str = "gelu"
    bias: bool = True


def one_linear(
    projector: LinearConfig, *, vision: EncoderArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """Into the decoder's width ``out``; ``theirs`` is the name of the linear itself."""
    table, shape = Table(f"{ours}.", theirs), (out, vision.hidden_size)
    return HuggingFacePart(rows=table.linear("linear_fc1", "", shape, split=Split.COLUMN))


def mlp(
    projector: MlpConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """LLaVA's, into the decoder's width ``out``."""
    width = vision.hidden_size
    return HuggingFacePart(rows=_linears(ours, theirs, width=width, out=out, bias=projector.bias))


def pixel_shuffle(
    projector: PixelShuffleConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """InternVL's, into the decoder's width ``out``."""
    width = vision.hidden_size * vision.spatial_merge_size**2
    norm = Table(f"{ours}.", f"{theirs}.").norm("norm", "layer_norm", width)
    return HuggingFacePart(
        rows=[*norm, *_linears(ours, theirs, width=width, out=out, bias=True)],
        values={"downsample_ratio": 1 / vision.spatial_merge_size},
        inexpressible=fixed_epsilon(projector, ours=ours, theirs=_LAYER_NORM_EPSILON),
    )


def average_pool(
    projector: AveragePoolConfig, *, vision: VisionArchitecture, out: int, ours: str, theirs: str
) -> HuggingFacePart:
    """Two linears as LLaVA's; the pooling has no tensors."""
    merge = vision.spatial_merge_size
    pooling = (
        f"{ours} pools {merge} x {merge} patches, which transformers' model of these files does not"
    )
    return HuggingFacePart(
        rows=_linears(ours, theirs, width=vision.hidden_size, out=out, bias=projector.bias),
        unread=() if merge == 1 else (pooling,),
    )


def _linears(ours: str, theirs: str, *, width: int, out: int, bias: bool) -> list[Row]:
    names = ("linear_1", "linear_2")
    return Table(f"{ours}.", f"{theirs}.").two_linears(names, (width, out, out), bias=bias)


_ACTIVATION = {"activation": "projector_hidden_act"}
_BIAS = {"bias": "multimodal_projector_bias"}

# Their keys of config.json stand at its top, beside the sections.
LOONGPLUG_PARTS = tuple(
    Part(
        name=name,
        config_class=config_class,
        build=f"loongplug.models.projectors.modules:build_{name}",
        hugging_face=f"loongplug.models.projectors:{tensors}",
        config_json=keys,
    )
    for name, config_class, tensors, keys in (
        ("linear", LinearConfig, "one_linear", {}),
        ("mlp", MlpConfig, "mlp", _ACTIVATION | _BIAS),
        ("pixel_shuffle", PixelShuffleConfig, "pixel_shuffle", _ACTIVATION),
        ("average_pool", AveragePoolConfig, "average_pool", _ACTIVATION | _BIAS),
    )
)
