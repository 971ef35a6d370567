"""Tiny towers of every kind, ours and transformers', with images for both."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from lone_parts import part_of

from loongplug.data.microbatch import MediaInput
from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Mapping
from loongplug.models.parts import load
from loongplug.models.patch_grids import patch_coordinates
from loongplug.models.patch_transformer import (
    ClipVisionConfig,
    Dinov2VisionConfig,
    InternVisionConfig,
    PatchTransformerConfig,
    SiglipVisionConfig,
)

NAME, ROOT = "image_encoder", "vision_tower"
PATCH, CHANNELS = 4, 3
_SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 24,  # heads of 6: no multiple of 4
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A kind: our config class, and what transformers calls config and model."""

    config_class: type[PatchTransformerConfig]
    theirs: str
    model: str

    def config(self, *, side: int = 5, **options: Any) -> PatchTransformerConfig:
        """Small, of ``side`` x ``side`` patches."""
        return self.config_class(**(_SIZES | {"image_size": side * PATCH} | options))


TOWERS = {
    "clip": Tower(
        config_class=ClipVisionConfig, theirs="CLIPVisionConfig", model="CLIPVisionModel"
    ),
    "siglip": Tower(
        config_class=SiglipVisionConfig, theirs="SiglipVisionConfig", model="SiglipVisionModel"
    ),
    "dinov2": Tower(config_class=Dinov2VisionConfig, theirs="Dinov2Config", model="Dinov2Model"),
    "intern": Tower(
        config_class=InternVisionConfig, theirs="InternVLVisionConfig", model="InternVLVisionModel"
    ),
}


def described(config: PatchTransformerConfig) -> HuggingFacePart:
    return load(part_of(config).hugging_face)(config, ours=NAME, theirs=ROOT)


def mapping_of(config: PatchTransformerConfig) -> Mapping:
    return Mapping(described(config).rows, twins={})


def their_config(config: PatchTransformerConfig) -> Any:
    """The same in transformers, as an export would say it."""
    values = dict(described(config).values)
    for name, key in part_of(config).config_json.items():
        values.setdefault(key, getattr(config, name))
    return getattr(transformers, _kind(config).theirs)(**values)


def _kind(config: PatchTransformerConfig) -> Tower:
    return next(each for each in TOWERS.values() if each.config_class is type(config))


def their_model(config: PatchTransformerConfig, *, seed: int = 0) -> Any:
    """transformers' model with random weights, nothing left at 0 or 1, where mistakes hide."""
    torch.manual_seed(seed)
    model = getattr(transformers, _kind(config).model)(their_config(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float()


def images(config: PatchTransformerConfig, *, count: int = 3) -> torch.Tensor:
    """[images, channels, height, width], the same at every call."""
    generator = torch.Generator().manual_seed(1)
    size = config.side * config.patch_size
    return torch.randn(count, CHANNELS, size, size, generator=generator)


def order_of(config: PatchTransformerConfig) -> torch.Tensor:
    """Of the patches in blocks, which of those row by row each one is."""
    row, column = patch_coordinates(config.side, config.side, merge=config.spatial_merge_size)
    return row * config.side + column


def unit(config: PatchTransformerConfig, pixels: torch.Tensor) -> MediaInput:
    """The images as patches in block order, each as (channel, row, column)."""
    patches = F.unfold(pixels, config.patch_size, stride=config.patch_size)
    rows = patches.transpose(1, 2)[:, order_of(config)]  # [images, patches, values]
    grid = torch.tensor([[1, config.side, config.side]] * len(pixels))
    return MediaInput(loaded=rows.flatten(0, 1), grids=grid)


def their_features(config: PatchTransformerConfig, model: Any, pixels: torch.Tensor) -> Any:
    """The hidden state that LLaVA or InternVL would take, without class token, in block order."""
    output = model(pixel_values=pixels, output_hidden_states=True)
    states = (
        output.last_hidden_state
        if config.norms_features
        else output.hidden_states[config.feature_layer]
    )
    return states[:, -(config.side**2) :][:, order_of(config)].flatten(0, 1)
