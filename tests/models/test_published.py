"""Models of the published sizes, and their folders in the published form."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published import (
    LLAVA,
    OMNI_3B,
    OMNI_7B,
    PARAMETERS,
    PUBLISHED,
    QWEN2_AUDIO,
    described,
    qwen2_5_config,
    qwen2_5_folder,
    whole,
    written,
)
from tiny_families import QWEN2_5_VL

from loongplug.checkpoint.safetensors_folder import present_name
from loongplug.models.audio_transformer import AudioTransformerConfig
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.models.registry import family_of
from loongplug.training.config import compose_model

HEARING = ["qwen2_audio_7b", "qwen2_5_omni_7b", "qwen2_5_omni_3b"]


def shapes_of(kind: type, config: Any) -> dict[str, tuple[int, ...]]:
    """Of the parameters of transformers' model, tied ones once."""
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    named = model.named_parameters()
    return {each.removesuffix(".weight"): tuple(value.shape) for each, value in named}


@pytest.mark.parametrize("name", PARAMETERS)
def test_tensors_are_those_of_transformers(name: str) -> None:
    """Its model of our config.json, and of the published one, with nothing of ours in it."""
    model = described(name)
    ours = {model.module_name(each): shape for each, shape in model.mapping.sources().items()}
    config = hf_config(model)
    kind = getattr(transformers, config.architectures[0])
    assert ours == shapes_of(kind, config)
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == PARAMETERS[name]
    if name in PUBLISHED:
        content = PUBLISHED[name][0]
        content = content.get("thinker_config", content)
        assert ours == shapes_of(kind, type(config).from_dict(content))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_folder_is_enough(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, PUBLISHED[name][0])
    assert compose_model(hf_folder=folder).config == compose_model(model_name=name).config
    assert hf_config_differences(folder, described(name)) == []


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llava_1_5_7b", 576),
        ("llava_1_5_13b", 576),
        ("internvl3_1b", 256),
        ("internvl3_2b", 256),
        ("internvl3_8b", 256),
    ],
)
def test_an_image_or_a_tile_has_so_many_tokens(name: str, tokens: int) -> None:
    model, encoder = described(name), compose_model(model_name=name).config.image_encoder
    assert hf_config(model).image_seq_length == tokens
    assert (encoder.side // encoder.spatial_merge_size) ** 2 == tokens


@pytest.mark.parametrize("name", HEARING)
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy full, exp"),
        ({"vision_config": {"model_type": "vit_mae"}}, "ViTMAEModel of transformers gives"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config.model_type 'gemma2'"),
        ({"vision_feature_layer": [-2, -5]}, "feature_layer"),
    ],
)
def test_what_is_not_taken_is_one_sentence(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compose_model(hf_folder=written(tmp_path, LLAVA | change))
    assert said in str(caught.value)


def test_another_layer_than_the_folder_s_is_a_difference(tmp_path: Path) -> None:
    written(tmp_path, LLAVA)
    composed = compose_model(model_name="llava_1_5_7b")
    last = dataclasses.replace(composed.config.image_encoder, feature_layer=-1)
    other = composed.family.load_hugging_face(
        dataclasses.replace(composed.config, image_encoder=last)
    )
    assert hf_config_differences(tmp_path, other) == [
        "config.json has vision_feature_layer -2, expected -1"
    ]


def test_names_of_the_published_files_are_known() -> None:
    theirs = compose_model(model_name="llava_1_5_7b").family.in_transformers
    before = "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight"
    present = "vision_tower.encoder.layers.3.mlp.fc1.weight"
    assert present_name(before, theirs.formerly) == present
    assert present_name(present, theirs.formerly) == present


@pytest.mark.quick
def test_what_tensor_shapes_do_not_tell_is_compared(tmp_path):
    model = described("qwen2_5_vl_7b")
    vision = qwen2_5_config("7b")["vision_config"]
    for changes, key in (
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_theta": 10000.0}, "rope_parameters"),
        ({"vision_config": vision | {"window_size": 224}}, "window_size"),
        ({"vision_config": vision | {"fullatt_block_indexes": [7, 15, 23]}}, "fullatt_block"),
        ({"vision_config": vision | {"tokens_per_second": 25}}, "tokens_per_second"),
    ):
        (difference,) = hf_config_differences(qwen2_5_folder(tmp_path, **changes), model)
        assert key in difference


@pytest.mark.quick
def test_what_transformers_cannot_read_is_one_line(tmp_path):
    model = described("qwen2_5_vl_7b")
    folder = qwen2_5_folder(tmp_path, vision_config=5)
    (difference,) = hf_config_differences(folder, model)
    assert difference.startswith(f"{folder}/config.json is not a Qwen2_5_VLConfig (")
    for missing in ("Qwen9VLConfig", "no_such_package:Config"):
        theirs = dataclasses.replace(model.in_transformers, config_class=missing)
        of_another = dataclasses.replace(model, in_transformers=theirs)
        (difference,) = hf_config_differences(folder, of_another)
        assert "has no config class" in difference
        assert ": install a version of" in difference


@pytest.mark.quick
def test_heads_of_another_size_cannot_be_exchanged():
    text = dataclasses.replace(QWEN2_5_VL.foundation, kv_channels=32)
    config = dataclasses.replace(QWEN2_5_VL, foundation=text)
    with pytest.raises(ValueError, match=r"kv_channels is 32, but .* = 20 there"):
        hf_config(family_of(config).load_hugging_face(config))
