"""config.json of published models, in the form of their folders, and how many parameters they have.

Written down here, so that no change of a YAML moves them.
"""

import json
from pathlib import Path
from typing import Any

from loongplug.models.family import HuggingFaceModel
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

# config.json of llava-hf/llava-1.5-7b-hf: what is a default is not said.
LLAVA: dict[str, Any] = {
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

# Of Qwen2.5-VL: hidden, layers, heads, query groups, ffn, vocabulary, tied; ffn of the ViT; all
# parameters.
QWEN2_5 = {
    "3b": (2048, 36, 16, 2, 11008, 151936, True, 3420, 3_754_622_976),
    "7b": (3584, 28, 28, 4, 18944, 152064, False, 3420, 8_292_166_656),
    "32b": (5120, 64, 40, 8, 27648, 152064, False, 3456, 33_452_718_336),
    "72b": (8192, 80, 64, 8, 29568, 152064, False, 3456, 73_410_777_344),
}


def qwen2_5_config(size: str) -> dict[str, Any]:
    """config.json in the form of the published folders: the decoder's values at the top."""
    hidden, layers, heads, groups, ffn, vocabulary, tied, vision_ffn, _ = QWEN2_5[size]
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


# By model: its config.json, and its parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llava_1_5_7b": (LLAVA, 7_063_427_072),
    "qwen2_audio_7b": (QWEN2_AUDIO, 8_397_094_912),
    "qwen2_5_omni_7b": (whole(OMNI_7B), 8_931_813_888),
    "qwen2_5_omni_3b": (whole(OMNI_3B), 4_703_464_448),
    **{
        f"qwen2_5_vl_{size}": (qwen2_5_config(size), parameters)
        for size, (*_, parameters) in QWEN2_5.items()
    },
}
# Of others, their parameters alone.
PARAMETERS = {name: parameters for name, (_, parameters) in PUBLISHED.items()} | {
    "llava_1_5_13b": 13_351_494_656,
    "internvl3_1b": 938_193_024,
    "internvl3_2b": 2_088_957_440,
    "internvl3_8b": 7_944_373_760,
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
}


def written(folder: Path, content: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def described(name: str) -> HuggingFaceModel:
    composed = compose_model(model_name=name)
    return composed.family.load_hugging_face(composed.config)


def qwen2_5_folder(folder: Path, **changes: Any) -> Path:
    """Qwen2.5-VL 7B's, with ``changes`` at its top."""
    return written(folder, qwen2_5_config("7b") | changes)
