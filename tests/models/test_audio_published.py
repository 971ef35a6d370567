"""The published sizes of models that hear, and their folders in the published form."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loongplug.models.audio_transformer.config import AudioTransformerConfig
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.training.config import compose_model

AUDIO: dict[str, Any] = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "attention_dropout": 0.0,
    "d_model": 1280,
    "dropout": 0.0,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 32,
    "init_std": 0.02,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
    "scale_embedding": False,
}
# config.json of Qwen/Qwen2-Audio-7B: what is a default of Qwen2's is not said.
QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": AUDIO | {"model_type": "qwen2_audio_encoder"},
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 156032,
}


def thinker(
    *, hidden: int, layers: int, heads: int, groups: int, ffn: int, vocabulary: int
) -> dict[str, Any]:
    """The thinker's section of config.json of Qwen/Qwen2.5-Omni."""
    return {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": AUDIO
        | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 100, "output_dim": hidden},
        "audio_end_token_id": 151648,
        "audio_start_token_id": 151647,
        "audio_token_index": 151646,
        "bos_token_id": 151644,
        "eos_token_id": 151645,
        "ignore_index": -100,
        "image_token_index": 151655,
        "init_std": 0.02,
        "model_type": "qwen2_5_omni_thinker",
        "pad_token_id": 151643,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": {
            "hidden_act": "silu",
            "hidden_size": hidden,
            "init_std": 0.02,
            "intermediate_size": ffn,
            "max_position_embeddings": 32768,
            "max_window_layers": layers,
            "model_type": "qwen2_5_omni_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": groups,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": vocabulary,
        },
        "user_token_id": 872,
        "video_token_index": 151656,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_channels": 3,
            "in_chans": 3,
            "init_std": 0.02,
            "intermediate_size": 3420,
            "model_type": "qwen2_5_omni_vision_encoder",
            "num_heads": 16,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
    }


def whole(section: dict[str, Any]) -> dict[str, Any]:
    """config.json of all of Qwen2.5-Omni: what speaks stands beside the thinker."""
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "enable_audio_output": True,
        "enable_talker": True,
        "model_type": "qwen2_5_omni",
        "talker_config": {"model_type": "qwen2_5_omni_talker", "hidden_size": 896},
        "thinker_config": section,
        "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
        "torch_dtype": "bfloat16",
    }


OMNI_7B = thinker(hidden=3584, layers=28, heads=28, groups=4, ffn=18944, vocabulary=152064)
OMNI_3B = thinker(hidden=2048, layers=36, heads=16, groups=2, ffn=11008, vocabulary=151936)
# By model: its config.json, and its parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_audio_7b": (QWEN2_AUDIO, 8_397_094_912),
    "qwen2_5_omni_7b": (whole(OMNI_7B), 8_931_813_888),
    "qwen2_5_omni_3b": (whole(OMNI_3B), 4_703_464_448),
}
each_model = pytest.mark.parametrize("name", PUBLISHED)


def written(folder: Path, content: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def described(name: str) -> HuggingFaceModel:
    composed = compose_model(model_name=name)
    return composed.family.load_hugging_face(composed.config)


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def published_in_transformers(name: str) -> Any:
    """Their model of the published config.json, with nothing of ours in it."""
    content, _ = PUBLISHED[name]
    if name == "qwen2_audio_7b":
        config = transformers.Qwen2AudioConfig.from_dict(content)
        kind = transformers.Qwen2AudioForConditionalGeneration
    else:
        config = transformers.Qwen2_5OmniThinkerConfig.from_dict(content["thinker_config"])
        kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    with torch.device("meta"):
        return kind(config)


@each_model
def test_tensors_are_those_of_transformers(name: str) -> None:
    model, parameters = described(name), PUBLISHED[name][1]
    ours = {model.module_name(each): shape for each, shape in model.mapping.sources().items()}
    theirs = {
        each.removesuffix(".weight"): tuple(parameter.shape)
        for each, parameter in published_in_transformers(name).named_parameters()
    }
    assert ours == theirs
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == parameters
    again = on_meta(hf_config(model)).named_parameters()
    assert {each.removesuffix(".weight"): tuple(value.shape) for each, value in again} == theirs


@each_model
def test_the_published_folder_is_enough(name: str, tmp_path: Path) -> None:
    found = compose_model(hf_folder=written(tmp_path, PUBLISHED[name][0])).config
    assert found == compose_model(model_name=name).config


@each_model
def test_a_sound_of_thirty_seconds_has_750_tokens(name: str) -> None:
    encoder = compose_model(model_name=name).config.audio_encoder
    assert isinstance(encoder, AudioTransformerConfig)
    assert encoder.sizes.states(3000) == 1500
    assert encoder.tokens(encoder.sizes.grid(3000)) == 750
    assert encoder.sizes.longest == {"qwen2_audio_7b": 3000}.get(name, 30_000)


def test_a_thinker_s_own_folder_is_enough(tmp_path: Path) -> None:
    """As it is published within the whole, and as transformers writes it, with its defaults."""
    expected = compose_model(model_name="qwen2_5_omni_3b").config
    assert compose_model(hf_folder=written(tmp_path / "section", OMNI_3B)).config == expected
    hf_config(described("qwen2_5_omni_3b")).save_pretrained(tmp_path / "own")
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    assert content["model_type"] == "qwen2_5_omni_thinker"
    assert compose_model(hf_folder=tmp_path / "own").config == expected


def test_the_audio_token_is_known_by_either_key(tmp_path: Path) -> None:
    content = dict(QWEN2_AUDIO)
    content["audio_token_id"] = content.pop("audio_token_index")
    found = compose_model(hf_folder=written(tmp_path, content | {"audio_token_id": 7})).config
    assert found.audio_token_id == 7


def test_qwen2_audio_s_output_layer_is_its_own(tmp_path: Path) -> None:
    """transformers ties nothing there, whatever a folder says, and a tied model has no folder."""
    composed = compose_model(model_name="qwen2_audio_7b")
    folder = written(tmp_path, QWEN2_AUDIO | {"tie_word_embeddings": True})
    assert compose_model(hf_folder=folder).config == composed.config
    text = dataclasses.replace(composed.config.foundation, tie_word_embeddings=True)
    tied = dataclasses.replace(composed.config, foundation=text)
    with pytest.raises(ValueError, match=r"^tie_word_embeddings is true, but the qwen2_audio mod"):
        hf_config(composed.family.load_hugging_face(tied))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"thinker_config": None}, "is not a Qwen2_5OmniThinkerConfig ("),
        ({"thinker_config": {**OMNI_7B, "vision_config": 5}}, "is not a Qwen2_5OmniThinkerConfig"),
        ({"model_type": "qwen2_5_omni_talker"}, "model_type 'qwen2_5_omni_talker', which Loong"),
    ],
)
def test_what_has_no_thinker_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compose_model(hf_folder=written(tmp_path, whole(OMNI_7B) | change))
    assert said in str(caught.value)


def test_differences_within_the_whole_are_named(tmp_path: Path) -> None:
    model = described("qwen2_5_omni_7b")
    written(tmp_path, whole(OMNI_7B))
    assert hf_config_differences(tmp_path, model) == []
    (line,) = hf_config_differences(tmp_path, model, alone=True)
    assert line == ("config.json has model_type 'qwen2_5_omni', expected 'qwen2_5_omni_thinker'")
    audio = OMNI_7B["audio_config"] | {"n_window": 50}
    written(tmp_path, whole(OMNI_7B | {"audio_config": audio}))
    (line,) = hf_config_differences(tmp_path, model)
    assert line == "config.json has audio_config.n_window 50, expected 100"
