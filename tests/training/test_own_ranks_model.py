"""A model whose encoders lie on ranks of their own is the same model elsewhere."""

import dataclasses
from pathlib import Path

import pytest
from command_lines import command_line
from rule_cases.hetero import APART, STAGES
from test_rules import changed

from loongplug.checkpoint.settings_notes import (
    ARCHITECTURE_FILE,
    check_architecture,
    for_any_layout,
    read_architecture,
    write_note,
)
from loongplug.training.arguments import parse_arguments
from loongplug.training.config import compose_model, to_yaml_data

pytestmark = pytest.mark.quick


def test_a_model_is_put_together_again() -> None:
    placed = changed(
        compose_model(model_name="qwen2_5_omni_tiny").config,
        [
            *("image_encoder.rank_offset=4", "image_encoder.tensor_model_parallel_size=2"),
            *("image_encoder.pipeline_model_parallel_size=2", "image_encoder.stage_layers=[2,1]"),
            *("audio_encoder.tensor_model_parallel_size=1", "image_encoder.freeze=True"),
        ],
    )
    whole = placed.beside_the_decoder()
    own = {"tensor_model_parallel_size": None, "pipeline_model_parallel_size": 1}
    assert whole.image_encoder == dataclasses.replace(
        placed.image_encoder, rank_offset=None, stage_layers=None, **own
    )
    assert whole.audio_encoder is placed.audio_encoder  # which lies beside the decoder as it is
    assert whole.image_encoder.freeze


def test_a_checkpoint_is_of_the_same_model_wherever_its_encoders_lay(tmp_path: Path) -> None:
    config = compose_model(model_name="qwen3_vl_tiny").config
    placed = changed(config, [*APART, *STAGES[1:], "image_encoder.stage_layers=[2,1]"])
    write_note(tmp_path / ARCHITECTURE_FILE, to_yaml_data(placed))
    check_architecture(tmp_path, to_yaml_data(config))
    noted = for_any_layout(read_architecture(tmp_path))
    of_its_place = {"rank_offset", "data_parallel_size", "stage_layers"}
    assert not of_its_place & noted["model"]["image_encoder"].keys()
    older = to_yaml_data(config)
    del older["model"]["image_encoder"]["data_parallel_size"]  # as before there was such a key
    (tmp_path / "older").mkdir()
    write_note(tmp_path / "older" / ARCHITECTURE_FILE, older)
    check_architecture(tmp_path / "older", to_yaml_data(config))


def test_a_conversion_takes_no_notice_of_where_encoders_lie(tmp_path: Path) -> None:
    line = [*command_line(tmp_path, model="qwen3_vl_tiny"), "model.image_encoder.rank_offset=1"]
    parsed = parse_arguments(line, training=False)
    assert parsed.model.image_encoder.rank_offset is None
    assert parsed.args.world_size == 1
    with pytest.raises(ValueError, match=r"1 rank with rank_offset 1 .* expected 2"):
        parse_arguments(line)
