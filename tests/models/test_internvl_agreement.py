"""InternVL's logits, loss and every gradient against transformers, in every layout.

Errors are measured as for Qwen3-VL. Tiles are of 4 x 4 patches, 4 tokens; images have one or two.
"""

import dataclasses
from pathlib import Path

import pytest
from fixed_images import PATCH, TEXT, Reference, assert_agrees, pictures_of, reference
from hf_batches import IMAGE, Batch, Medium
from hf_reference import LAYOUTS, Layout

from loongplug.models.internvl.config import InternVLConfig
from loongplug.models.patch_transformer.config import InternVisionConfig
from loongplug.models.projectors.config import PixelShuffleConfig
from loongplug.models.text_decoders.config import Qwen2TextConfig

SIDE, MERGE = 4, 2
TILE, TILES = Medium((1, SIDE, SIDE)), Medium((2, SIDE, SIDE))
MEDIA = ((TILES, TILE), (), (), (TILE,), (TILE, TILE), (), (TILES,), ())
MODEL = InternVLConfig(
    image_encoder=InternVisionConfig(
        num_layers=3,
        hidden_size=24,
        ffn_hidden_size=48,
        num_attention_heads=2,
        patch_size=PATCH,
        image_size=SIDE * PATCH,
        spatial_merge_size=MERGE,
    ),
    image_projector=PixelShuffleConfig(),
    foundation=Qwen2TextConfig(**TEXT),
    image_token_id=IMAGE,
)


@pytest.fixture(scope="module")
def data() -> Batch:
    return pictures_of(MEDIA, merge=MERGE)


@pytest.fixture(scope="module")
def untied(data: Batch, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tmp_path_factory.mktemp("hf"), MODEL, data, merge=MERGE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_internvl_step_agrees_with_transformers(
    untied: Reference, data: Batch, layout: Layout
) -> None:
    assert_agrees(untied, data, layout)


def test_tied_embeddings_and_the_final_norm_agree_with_transformers(
    data: Batch, tmp_path: Path
) -> None:
    model = dataclasses.replace(
        MODEL,
        image_encoder=dataclasses.replace(MODEL.image_encoder, final_norm=True),
        foundation=dataclasses.replace(MODEL.foundation, tie_word_embeddings=True),
    )
    made = reference(tmp_path, model, data, merge=MERGE)
    assert_agrees(made, data, Layout(tp=2, pp=2))
