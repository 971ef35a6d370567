"""Audio transformers' files: names, config.json, and what never trains."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file
from sounds import TOWERS, described, mapping_of, part_of, their_config

from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import _fields

each_tower = pytest.mark.parametrize("name", TOWERS)


def whole_model(name: str, tower: Any) -> Any:
    """A model of transformers around the tower."""
    text = {
        "hidden_size": 10,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 32,
    }
    if name == "whisper":
        return transformers.WhisperModel(tower)
    if name == "qwen2_audio":
        return transformers.Qwen2AudioForConditionalGeneration(
            transformers.Qwen2AudioConfig(
                audio_config=tower, text_config=transformers.Qwen2Config(**text)
            )
        )
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=tower.to_dict(),
        text_config=text,
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "out_hidden_size": 10},
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


@each_tower
def test_rows_have_the_names_of_a_whole_model(name: str, tmp_path: Path) -> None:
    config, tower = TOWERS[name].config(), TOWERS[name]
    more: dict[str, Any] = {}
    if name == "whisper":
        more = {
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 8,
            "vocab_size": 32,
            "max_target_positions": 4,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
            "decoder_start_token_id": 0,
        }
    whole_model(name, their_config(config, **more)).save_pretrained(tmp_path)
    found = {
        key.removeprefix("model."): tuple(each.shape)
        for key, each in load_file(tmp_path / "model.safetensors").items()
    }
    assert mapping_of(config).sources() == {
        key: shape
        for key, shape in found.items()
        if key.startswith(f"{tower.root}.") and not key.startswith(f"{tower.root}.proj.")
    }


@each_tower
def test_config_json_gives_the_config_back(name: str) -> None:
    config = TOWERS[name].config()
    part, section = part_of(config), their_config(config)
    assert section.model_type == part.model_type
    fields = _fields(part, section)
    assert fields == {each: getattr(config, each) for each in part.config_json}
    assert fields.keys() >= {"mel_bins", "max_positions", "activation", "initializer_range"}
    left = {each.name for each in dataclasses.fields(config)} - fields.keys()
    of_training = {
        *("data_parallel_size", "rank_offset", "tensor_model_parallel_size", "mode"),
        *("pipeline_model_parallel_size", "stage_layers"),
        *("freeze", "joined_rows", "lora", "lr_mult", "recompute"),
    }
    assert left <= of_training | {"layernorm_epsilon", "longest"}


def test_tables_of_positions_never_train() -> None:
    config = TOWERS["qwen2_audio"].config()
    tables = [each.name for each in mapping_of(config).entries() if "embed_positions" in each.name]
    assert tables
    assert not any(Freezing(train=("*",)).trains(each) for each in tables)


def test_an_epsilon_of_ones_own_is_told() -> None:
    (sentence,) = described(TOWERS["omni"].config(layernorm_epsilon=1e-6)).inexpressible
    assert "layernorm_epsilon is 1e-06" in sentence
