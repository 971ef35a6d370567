"""LLaVA's logits, loss and every gradient against transformers, in every layout, and its pairs.

Errors are measured as for Qwen3-VL. Images are of 5 x 5 patches.
"""

from pathlib import Path

import pytest
from fixed_images import PATCH, TEXT, Reference, assert_agrees, pictures_of, reference
from hf_batches import IMAGE, Batch, Medium
from hf_reference import LAYOUTS, Layout

from loongplug.models.architecture import TextArchitecture
from loongplug.models.llava.config import LlavaConfig
from loongplug.models.patch_transformer.config import (
    ClipVisionConfig,
    Dinov2VisionConfig,
    PatchTransformerConfig,
    SiglipVisionConfig,
)
from loongplug.models.projectors.config import MlpConfig
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.models.text_decoders.config import (
    LlamaTextConfig,
    MistralTextConfig,
    Qwen2TextConfig,
    Qwen3MoeTextConfig,
    Qwen3TextConfig,
)

SIDE = 5
PICTURE = Medium((1, SIDE, SIDE))
MEDIA = ((PICTURE,), (), (), (PICTURE,), (PICTURE,), (), (PICTURE,), ())
VISION = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": SIDE * PATCH,
    "feature_layer": -2,
}
SCALING = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CLIP = ClipVisionConfig(**VISION)
PAIRS: dict[str, tuple[PatchTransformerConfig, TextArchitecture]] = {
    "siglip-qwen3": (
        SiglipVisionConfig(**VISION),
        Qwen3TextConfig(**TEXT | {"kv_channels": 24, "tie_word_embeddings": True}),
    ),
    "dinov2-qwen2": (Dinov2VisionConfig(**VISION), Qwen2TextConfig(**TEXT)),
    "clip-mistral": (CLIP, MistralTextConfig(**TEXT, sliding_window=4096)),
    "clip-llama3": (CLIP, LlamaTextConfig(**TEXT, rope_scaling=SCALING)),
    "clip-qwen3-moe": (
        CLIP,
        Qwen3MoeTextConfig(**TEXT, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24),
    ),
}


def llava(
    encoder: PatchTransformerConfig = CLIP, decoder: TextArchitecture | None = None
) -> LlavaConfig:
    return LlavaConfig(
        image_encoder=encoder,
        image_projector=MlpConfig(),
        foundation=decoder or LlamaTextConfig(**TEXT),
        image_token_id=IMAGE,
    )


@pytest.fixture(scope="module")
def data() -> Batch:
    return pictures_of(MEDIA)


@pytest.fixture(scope="module")
def untied(data: Batch, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tmp_path_factory.mktemp("hf"), llava(), data)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_llava_step_agrees_with_transformers(
    untied: Reference, data: Batch, layout: Layout
) -> None:
    assert_agrees(untied, data, layout)


@pytest.mark.parametrize("pair", PAIRS)
def test_pair_agrees_with_transformers(pair: str, data: Batch, tmp_path: Path) -> None:
    made = reference(tmp_path, llava(*PAIRS[pair]), data)
    experts = "moe" in pair
    assert_agrees(made, data, Layout(ep=2, dp=2) if experts else Layout(tp=2, pp=2))
