"""Qwen2.5-VL in and out of Hugging Face: names and config.json."""

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tiny_families import QWEN2_5_VL

from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.models.registry import families
from loongplug.training.config import compose_model

hugging_face = families()["qwen2_5_vl"].load_hugging_face

# hidden, layers, heads, query groups, ffn, vocabulary, tied; ffn of the ViT; all parameters.
PUBLISHED = {
    "3b": (2048, 36, 16, 2, 11008, 151936, True, 3420, 3_754_622_976),
    "7b": (3584, 28, 28, 4, 18944, 152064, False, 3420, 8_292_166_656),
    "32b": (5120, 64, 40, 8, 27648, 152064, False, 3456, 33_452_718_336),
    "72b": (8192, 80, 64, 8, 29568, 152064, False, 3456, 73_410_777_344),
}


def published_config(size: str) -> dict[str, Any]:
    """config.json in the form of the published folders: the decoder's values at the top."""
    hidden, layers, heads, groups, ffn, vocabulary, tied, vision_ffn, _ = PUBLISHED[size]
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 128000,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": vision_ffn,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }


def published_folder(folder: Path, size: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(published_config(size) | changes))
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_are_those_of_the_yaml(size, tmp_path):
    model = hugging_face(compose_model(model_name=f"qwen2_5_vl_{size}").config)
    assert hf_config_differences(published_folder(tmp_path, size), model) == []
    assert sum(prod(shape) for shape in model.mapping.sources().values()) == PUBLISHED[size][-1]
    assert hf_config(model).text_config.max_position_embeddings == 128000


@pytest.mark.quick
def test_what_tensor_shapes_do_not_tell_is_compared(tmp_path):
    model = hugging_face(compose_model(model_name="qwen2_5_vl_7b").config)
    vision = published_config("7b")["vision_config"]
    for changes, key in (
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_theta": 10000.0}, "rope_parameters"),
        ({"vision_config": vision | {"window_size": 224}}, "window_size"),
        ({"vision_config": vision | {"fullatt_block_indexes": [7, 15, 23]}}, "fullatt_block"),
        ({"vision_config": vision | {"tokens_per_second": 25}}, "tokens_per_second"),
    ):
        (difference,) = hf_config_differences(published_folder(tmp_path, "7b", **changes), model)
        assert key in difference


@pytest.mark.quick
def test_what_transformers_cannot_read_is_one_line(tmp_path):
    model = hugging_face(compose_model(model_name="qwen2_5_vl_7b").config)
    folder = published_folder(tmp_path, "7b", vision_config=5)
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
    config = QWEN2_5_VL
    text = dataclasses.replace(config.foundation, kv_channels=32)
    with pytest.raises(ValueError, match=r"kv_channels is 32, but .* = 20 there"):
        hf_config(hugging_face(dataclasses.replace(config, foundation=text)))
