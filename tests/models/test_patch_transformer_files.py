"""Patch transformers' files: names, config.json, checkpoints, and what only travels in them."""

from typing import Any

import pytest
import transformers
from lone_parts import part_of
from towers import NAME, TOWERS, described, their_config

from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import _fields
from loongplug.models.patch_transformer import PatchTransformerConfig

CONFIGS = {
    "clip": TOWERS["clip"].config(feature_layer=-2),
    "siglip": TOWERS["siglip"].config(feature_layer=-3),
    "siglip, no head": TOWERS["siglip"].config(head=False, final_norm=True),
    "dinov2": TOWERS["dinov2"].config(feature_layer=-2),
    "intern": TOWERS["intern"].config(side=6),
    "intern, normed": TOWERS["intern"].config(side=6, final_norm=True, mask_token=True),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@each_config
def test_config_json_gives_the_config_back(config: PatchTransformerConfig) -> None:
    part = part_of(config)
    section = their_config(config)
    assert section.model_type == part.model_type
    fields = _fields(part, section)
    assert {name: getattr(config, name) for name in fields} == fields
    sizes = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "in_channels"}
    assert sizes | {"image_size", "patch_size", "layernorm_epsilon", "activation"} <= set(fields)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("intern", {"norm_type": "rms_norm"}),
        ("intern", {"use_qk_norm": True}),  # InternViT-6B
        ("intern", {"attention_bias": False}),
        ("intern", {"use_mean_pooling": False}),
        ("dinov2", {"use_swiglu_ffn": True}),  # DINOv2-giant
        ("dinov2", {"qkv_bias": False}),
    ],
)
def test_what_there_is_not_differs_from_what_config_json_is_compared_with(
    name: str, changes: dict[str, Any]
) -> None:
    values = described(CONFIGS[name]).values
    ((key, other),) = changes.items()
    assert values[key] != other


def test_a_tower_that_is_not_square_is_refused() -> None:
    part = part_of(CONFIGS["intern"])
    section = transformers.InternVLVisionConfig(image_size=(448, 224))
    with pytest.raises(ValueError, match="image_size 448 x 224 is not a square"):
        _fields(part, section)


def test_an_mlp_that_transformers_has_no_words_for_cannot_be_exported() -> None:
    (sentence,) = described(TOWERS["dinov2"].config(ffn_hidden_size=50)).inexpressible
    assert "ffn_hidden_size is 50" in sentence


def test_patterns_are_told_of_what_can_train_only() -> None:
    travels = f"{NAME}.carried.post_layernorm_weight"
    freezing = Freezing(train=("*post*",), freeze=("*post_layernorm*",))
    assert not freezing.trains(travels)
    assert freezing.without_effect([travels]) == {"*post*", "*post_layernorm*"}
