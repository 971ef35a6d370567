"""Qwen2.5-Omni's thinker, which sees and hears at once: logits, loss and every gradient against
transformers, in every layout.

Errors are measured as for Qwen3-VL. Sounds are cut into chunks of 8 frames.
"""

import dataclasses
from typing import Any

import pytest
import torch
from fixed_images import Reference, as_saved
from heard_batches import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    HeardBatch,
    Senses,
    Sound,
    feature_arguments,
    heard,
)
from hf_batches import TOKEN_IDS, VOCABULARY, Batch, Medium, timed_positions
from hf_reference import (
    LAYOUTS,
    Layout,
    assert_agreement,
    media_arguments,
    reference_model,
    reference_step,
)

from loongplug.models.audio_transformer.config import OmniAudioConfig
from loongplug.models.projectors.config import LinearConfig
from loongplug.models.qwen2_5_omni.config import OmniVisionConfig, Qwen25OmniConfig
from loongplug.models.qwen2_5_vl.config import Qwen25DecoderConfig, Qwen25ProjectorConfig

PER_SECOND = 25
# Both, either and neither, of odd lengths, in either order.
MEDIA = (
    (Medium((1, 2, 2)), Sound(19)),
    (),
    (Medium((2, 2, 4), 0.08), Sound(8)),
    (Sound(3), Medium((1, 4, 2)), Sound(12)),
    (Sound(17),),
    (Medium((1, 6, 4)),),
    (Sound(13), Medium((2, 2, 2), 0.12)),
    (),
)
HIDDEN = 64
MODEL = Qwen25OmniConfig(
    image_encoder=OmniVisionConfig(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=2,
        patch_size=4,
        window_size=16,
        full_attention_layers=(1,),
        tokens_per_second=PER_SECOND,
    ),
    image_projector=Qwen25ProjectorConfig(),
    audio_encoder=OmniAudioConfig(
        num_layers=2,
        hidden_size=24,
        ffn_hidden_size=48,
        num_attention_heads=2,
        mel_bins=6,
        max_positions=12,
        n_window=4,
        output_dim=HIDDEN,
    ),
    audio_projector=LinearConfig(),
    foundation=Qwen25DecoderConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        ffn_hidden_size=112,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=VOCABULARY,
        mrope_section=(2, 3, 3),
    ),
    **TOKEN_IDS,
    audio_token_id=AUDIO,
    audio_start_token_id=AUDIO_START,
    audio_end_token_id=AUDIO_END,
)


@pytest.fixture(scope="module")
def data() -> HeardBatch:
    senses = Senses(
        sizes=MODEL.audio_encoder.sizes,
        patch_values=MODEL.image_encoder.row_values,
        marks=True,
        positions=timed_positions(MODEL.video_style(), after_times=True),
    )
    return heard(MEDIA, senses)


def arguments(data: Batch, ids: torch.Tensor) -> dict[str, Any]:
    assert isinstance(data, HeardBatch)
    seen = media_arguments(data)
    seen["video_second_per_grid"] = seen.pop("second_per_grid_ts")
    return seen | feature_arguments(data, MODEL.audio_encoder.sizes)


@pytest.fixture(scope="module")
def reference(data: HeardBatch, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("hf")
    theirs = reference_model(MODEL)
    theirs.save_pretrained(folder)
    step = reference_step(theirs, data, arguments=arguments)
    return MODEL, folder, dataclasses.replace(step, gradients=as_saved(theirs, folder / "grad"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_thinker_step_agrees_with_transformers(
    reference: Reference, data: HeardBatch, layout: Layout
) -> None:
    model, folder, expected = reference
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)
