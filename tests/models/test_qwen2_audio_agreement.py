"""Qwen2-Audio's logits, loss and every gradient against transformers, in every layout.

Errors are measured as for Qwen3-VL. Sounds are of up to 24 frames.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fixed_images import Reference, as_saved, plain
from heard_batches import AUDIO, HeardBatch, Senses, Sound, feature_arguments, heard
from hf_batches import VOCABULARY
from hf_reference import Layout, assert_agreement, reference_model, reference_step

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
LAYOUTS = [
    pytest.param(Layout(), marks=pytest.mark.quick),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]
ENCODER = Qwen2AudioEncoderConfig(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=48,
    num_attention_heads=2,
    mel_bins=MEL,
    max_positions=POSITIONS,
)
TEXT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 112,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": VOCABULARY,
    "rotary_base": 10_000.0,
    "max_position_embeddings": 512,
}
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


def check(reference: Reference, data: HeardBatch, layout: Layout) -> None:
    model, folder, expected = reference
    encoder = dataclasses.replace(model.audio_encoder, recompute=layout.recompute)
    assert_agreement(
        dataclasses.replace(model, audio_encoder=encoder),
        folder,
        layout=layout,
        data=data,
        expected=expected,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_qwen2_audio_step_agrees_with_transformers(
    reference: Reference, data: HeardBatch, layout: Layout
) -> None:
    check(reference, data, layout)


def test_another_decoder_agrees_with_transformers(data: HeardBatch, tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, foundation=LlamaTextConfig(**TEXT))
    check(made(tmp_path, model, data), data, Layout(tp=2, pp=2))
