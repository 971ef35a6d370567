"""The published sizes of models with images of one size, and a folder in its published form."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loongplug.checkpoint.tensor_folder import present_name
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.training.config import compose_model

# By model: its parameters, and the visual tokens of an image (of a tile).
PUBLISHED = {
    "llava_1_5_7b": (7_063_427_072, 576),
    "llava_1_5_13b": (13_351_494_656, 576),
    "internvl3_1b": (938_193_024, 256),
    "internvl3_2b": (2_088_957_440, 256),
    "internvl3_8b": (7_944_373_760, 256),
}


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_are_those_of_transformers(name: str) -> None:
    composed = compose_model(model_name=name)
    described = composed.family.load_hugging_face(composed.config)
    shapes = described.mapping.sources()
    parameters, tokens = PUBLISHED[name]
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
    config = hf_config(described)
    assert config.image_seq_length == tokens
    theirs = {name: tuple(each.shape) for name, each in on_meta(config).named_parameters()}
    assert sum(torch.Size(shape).numel() for shape in theirs.values()) == parameters
    ours = {described.module_name(each) for each in shapes}
    assert ours == {each.removesuffix(".weight") for each in theirs}
    encoder = composed.config.image_encoder
    assert (encoder.side // encoder.spatial_merge_size) ** 2 == tokens


def test_llava_is_transformers_default() -> None:
    """Its defaults are the published 7B, but for the padded vocabulary, its norm and its texts."""
    composed = compose_model(model_name="llava_1_5_7b")
    ours = hf_config(composed.family.load_hugging_face(composed.config))
    default = transformers.LlavaConfig()
    vision, usual = ours.vision_config.to_dict(), default.vision_config.to_dict()
    of_the_pooled = {"projection_dim", "vocab_size"}  # of CLIP as a whole, which no one asks for
    assert {name for name in usual if vision.get(name) != usual[name]} == of_the_pooled
    text, usual = ours.text_config.to_diff_dict(), default.text_config.to_diff_dict()
    assert {name for name in text if text[name] != usual.get(name)} == {
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    }


def published_folder(folder: Path) -> Path:
    """config.json of llava-hf/llava-1.5-7b-hf: what is a default is not said."""
    content = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_the_published_folder_is_enough(tmp_path: Path) -> None:
    found = compose_model(hf_folder=published_folder(tmp_path)).config
    assert found == compose_model(model_name="llava_1_5_7b").config


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
    file = published_folder(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r".") as caught:
        compose_model(hf_folder=tmp_path)
    assert said in str(caught.value)


def test_another_layer_than_the_folder_s_is_a_difference(tmp_path: Path) -> None:
    published_folder(tmp_path)
    composed = compose_model(model_name="llava_1_5_7b")
    last = replace(composed.config.image_encoder, feature_layer=-1)
    other = composed.family.load_hugging_face(replace(composed.config, image_encoder=last))
    assert hf_config_differences(tmp_path, other) == [
        "config.json has vision_feature_layer -2, expected -1"
    ]


def test_names_of_the_published_files_are_known() -> None:
    theirs = compose_model(model_name="llava_1_5_7b").family.in_transformers
    before = "vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight"
    present = "vision_tower.encoder.layers.3.mlp.fc1.weight"
    assert present_name(before, theirs.formerly) == present
    assert present_name(present, theirs.formerly) == present
