"""Qwen2-Audio's logits, loss and every gradient against transformers, in every layout.

Errors are measured as for Qwen3-VL. Sounds are of up to 24 frames.
"""

import dataclasses
from pathlib import Path

import pytest
from fixed_images import TEXT, Reference, as_saved, plain
from heard_batches import AUDIO, HeardBatch, Senses, Sound, feature_arguments, heard
from hf_reference import LAYOUTS, Layout, assert_agreement, reference_model, reference_step

from loongplug.models.audio_transformer.config import Qwen2AudioEncoderConfig
from loongplug.models.projectors.config import LinearConfig
from loongplug.models.qwen2_audio.config import Qwen2AudioConfig
from loongplug.models.text_decoders.config import LlamaTextConfig, Qwen2TextConfig

MEL, POSITIONS = 6, 12
# None to two, of odd and even lengths, one that fills the window, one of a single token.
MEDIA = (
    (Sound(9), Sound(24)),
    (),
    (Sound(14),),
    (Sound(3), Sound(11)),
    (),
    (Sound(16),),
    (Sound(23),),
    (),
)
ENCODER = Qwen2AudioEncoderConfig(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=48,
    num_attention_heads=2,
    mel_bins=MEL,
    max_positions=POSITIONS,
)
MODEL = Qwen2AudioConfig(
    audio_encoder=ENCODER,
    audio_projector=LinearConfig(),
    foundation=Qwen2TextConfig(**TEXT),
    audio_token_id=AUDIO,
)


@pytest.fixture(scope="module")
def data() -> HeardBatch:
    return heard(MEDIA, Senses(sizes=ENCODER.sizes, positions=plain))


def made(folder: Path, model: Qwen2AudioConfig, data: HeardBatch) -> Reference:
    theirs = reference_model(model)
    theirs.save_pretrained(folder)
    features = feature_arguments(data, model.audio_encoder.sizes)
    step = reference_step(theirs, data, arguments=lambda data, ids: features)
    return model, folder, dataclasses.replace(step, gradients=as_saved(theirs, folder / "grad"))


@pytest.fixture(scope="module")
def reference(data: HeardBatch, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made(tmp_path_factory.mktemp("hf"), MODEL, data)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_qwen2_audio_step_agrees_with_transformers(
    reference: Reference, data: HeardBatch, layout: Layout
) -> None:
    model, folder, expected = reference
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)


def test_another_decoder_agrees_with_transformers(data: HeardBatch, tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, foundation=LlamaTextConfig(**TEXT))
    _, folder, expected = made(tmp_path, model, data)
    assert_agreement(model, folder, layout=Layout(tp=2, pp=2), data=data, expected=expected)
