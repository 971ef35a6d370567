"""A model read from a Hugging Face folder: the YAML that its config.json stands for."""

import dataclasses
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from published import qwen2_5_folder

from loongplug.checkpoint.settings_notes import ARCHITECTURE_FILE
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.training.config import (
    ComposedModel,
    available_models,
    compose_asked_for,
    compose_model,
    shown_name,
    to_yaml_data,
)

pytestmark = pytest.mark.quick


def with_ids(composed: ComposedModel) -> Any:
    """The model with token ids of its own where the tokenizer would give them."""
    names = enumerate(composed.family.special_tokens, start=3)
    ids = {name: number for number, name in names if getattr(composed.config, name) is None}
    return dataclasses.replace(composed.config, **ids)


def folder_of(folder: Path, *, name: str = "qwen3_vl_tiny", **changes: Any) -> Path:
    """A folder with the config.json of a model, with ``changes`` at its top."""
    composed = compose_model(model_name=name)
    hf_config(composed.family.load_hugging_face(with_ids(composed))).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def flags(**given: Any) -> Namespace:
    nothing = dict.fromkeys(("model_name", "config_file", "load_hf", "load", "load_lora"))
    return Namespace(**nothing | {"trusted_packages": []} | given)


@pytest.mark.parametrize("name", available_models())
def test_every_model_comes_back_from_its_config_json(name, tmp_path):
    found = compose_model(hf_folder=folder_of(tmp_path, name=name))
    assert found.config == with_ids(compose_model(model_name=name))
    (tmp_path / "again.yaml").write_text("# @package _global_\n" + found.to_yaml())
    assert compose_model(config_file=tmp_path / "again.yaml").config == found.config


def test_overrides_change_what_they_name(tmp_path):
    folder = folder_of(tmp_path)
    override = "model.image_encoder.freeze=true"
    found = compose_model(hf_folder=folder, overrides=[override]).config
    assert found.image_encoder.freeze
    assert found.foundation == compose_model(hf_folder=folder).config.foundation
    with pytest.raises(ValueError, match=r"^override .* the closest is num_layers$"):
        compose_model(hf_folder=folder, overrides=["model.foundation.layers=2"])


def test_a_name_or_a_file_counts_before_the_folder(tmp_path):
    folder = folder_of(tmp_path)
    given = flags(model_name="qwen2_5_vl_tiny", load_hf=str(folder))
    assert compose_asked_for(given).family.name == "qwen2_5_vl"
    assert shown_name(given) == "qwen2_5_vl_tiny"
    assert shown_name(flags(load_hf="/models/Qwen2.5-VL-7B-Instruct")) == "Qwen2.5-VL-7B-Instruct"
    assert shown_name(flags(load_hf=".")) == Path.cwd().name


def test_a_checkpoint_knows_its_model(tmp_path):
    composed = compose_model(
        model_name="qwen3_vl_tiny", overrides=["model.image_encoder.tensor_model_parallel_size=2"]
    )
    (tmp_path / ARCHITECTURE_FILE).write_text(json.dumps(to_yaml_data(composed.config)))
    found = compose_asked_for(flags(load=str(tmp_path)), converts=True).config
    assert found == compose_model(model_name="qwen3_vl_tiny").config  # of any layout
    with pytest.raises(
        ValueError, match="give one of --model-name NAME and --config-file PATH, or"
    ):
        compose_asked_for(flags(load=str(tmp_path / "empty")), converts=True)
    with pytest.raises(ValueError, match="give one of --model-name"):  # its layout may be another
        compose_asked_for(flags(load=str(tmp_path)))


def test_other_kinds_are_refused_with_the_list_of_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json, which says what model it has"):
        compose_model(hf_folder=tmp_path)
    for content, said in (
        (
            '{"model_type": "blip"}',
            r"'blip', .*expected one of internvl, llava, qwen2_5_omni, qwen2_5_omni_thinker, ",
        ),
        ('{"model_type": ["qwen3_vl"]}', r"model_type \['qwen3_vl'\], which LoongPlug does not"),
        ("[]", r"config\.json is not a JSON object"),
        ('{"model_type": "qwen3_vl", "vision_config": 5}', r"is not a Qwen3VLConfig \("),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            compose_model(hf_folder=tmp_path)


def test_values_that_cannot_be_used_are_one_sentence_of_the_folder(tmp_path):
    nothing = qwen2_5_folder(tmp_path, num_attention_heads=0)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: config\.json has values that .*head_size"):
        compose_model(hf_folder=nothing)
    for theta, said in (
        (
            "${oc.env:HOME}",
            rf"^{tmp_path}: config\.json has rope_parameters\.rope_theta '\$\{{oc\.env:HOME",
        ),
        ("???", rf"^{tmp_path}/config\.json does not compose: "),
    ):
        with pytest.raises(ValueError, match=said):
            compose_model(hf_folder=qwen2_5_folder(tmp_path, rope_theta=theta))


def test_a_note_without_its_model_is_named_by_its_own_file(tmp_path):
    (tmp_path / ARCHITECTURE_FILE).write_text('{"model": {}}')
    with pytest.raises(
        ValueError, match=rf"^{tmp_path / ARCHITECTURE_FILE}: model\._target_ is mi"
    ):
        compose_asked_for(flags(load=str(tmp_path)), converts=True)


def test_a_model_that_transformers_lacks_has_no_config_json(tmp_path, monkeypatch):
    composed = compose_model(model_name="qwen3_vl_tiny")
    theirs = composed.family.load_hugging_face(with_ids(composed))
    none = dataclasses.replace(theirs.in_transformers, config_class=None)
    lacking = dataclasses.replace(theirs, in_transformers=none)
    said = "^transformers has no Qwen3VLForConditionalGeneration, so it has no Hugging Face folder"
    with pytest.raises(ValueError, match=said):
        hf_config(lacking)
    # Tensors alone are nothing to compare; a config.json is of another model.
    other = dataclasses.replace(theirs, inexpressible=("its words are lost",))
    for described in (lacking, other):
        assert hf_config_differences(tmp_path, described) == []
    folder_of(tmp_path)
    (difference,) = hf_config_differences(tmp_path, lacking)
    assert re.match(said, difference)
    assert hf_config_differences(tmp_path, other) == ["its words are lost"]
    # Nor does it stand in the way of models that transformers has.
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "outside"))
    found = compose_model(hf_folder=tmp_path, trusted_packages=["composed_vl"])
    assert found.family.name == "qwen3_vl"


def test_what_the_parts_cannot_do_is_named(tmp_path):
    folder = qwen2_5_folder(tmp_path, use_sliding_window=True)
    with pytest.raises(ValueError, match=r"qwen2_5_vl model that LoongPlug cannot build .*sliding"):
        compose_model(hf_folder=folder)


def test_keys_that_nothing_is_computed_from_may_say_anything(tmp_path):
    composed = compose_model(model_name="qwen3_vl_moe_tiny")
    folder = folder_of(tmp_path, name="qwen3_vl_moe_tiny")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["intermediate_size"] += 64
    path.write_text(json.dumps(content))
    model = composed.family.load_hugging_face(with_ids(composed))
    assert hf_config_differences(folder, model) == []
    content["text_config"]["moe_intermediate_size"] += 64
    path.write_text(json.dumps(content))
    (difference,) = hf_config_differences(folder, model)
    assert "moe_intermediate_size" in difference


@pytest.mark.parametrize("name", ["qwen3_vl_tiny", "llava_tiny"])
def test_options_that_the_model_does_not_have_are_refused_unless_they_say_nothing(name, tmp_path):
    path = folder_of(tmp_path, name=name) / "config.json"
    plain = json.loads(path.read_text())
    model = compose_model(hf_folder=tmp_path)
    for key, nothing, value in (
        ("attention_dropout", 0.0, 0.1),
        ("final_logit_softcapping", None, 30.0),
        ("residual_multiplier", 1.0, 0.22),
    ):
        for said in (nothing, value):
            changed = json.loads(json.dumps(plain))
            changed.get("text_config", changed)[key] = said
            path.write_text(json.dumps(changed))
            if said == nothing:
                assert compose_model(hf_folder=tmp_path).config == model.config
                continue
            with pytest.raises(ValueError, match=rf"has (text_config\.)?{key} {value}, which"):
                compose_model(hf_folder=tmp_path)


def test_heads_that_turn_in_part_are_seen(tmp_path):
    composed = compose_model(model_name="qwen3_vl_tiny")
    path = folder_of(tmp_path) / "config.json"
    content = json.loads(path.read_text())
    model = composed.family.load_hugging_face(with_ids(composed))
    for part, differences in ((1.0, 0), (0.5, 1)):
        content["text_config"]["rope_parameters"]["partial_rotary_factor"] = part
        path.write_text(json.dumps(content))
        assert len(hf_config_differences(tmp_path, model)) == differences
