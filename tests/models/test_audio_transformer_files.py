"""Audio transformers' files: names, config.json, and what never trains."""

import dataclasses

import pytest
from lone_parts import part_of
from sounds import TOWERS, described, mapping_of, their_config

from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import _fields

each_tower = pytest.mark.parametrize("name", TOWERS)


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
