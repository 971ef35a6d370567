"""A tiny Qwen3-VL, random in transformers and built by us, for the checkpoint tests."""

from pathlib import Path
from typing import Any

from hf_models import Layout, build_chunks, decoder_config, reference_model

from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen3_vl import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)
from loongplug.models.registry import families

hugging_face = families()["qwen3_vl"].load_hugging_face


def tiny_config(*, tied: bool) -> Qwen3VLConfig:
    """Sizes that all differ, so that swapped axes and names show; splits over 2 and 4 ranks."""
    return Qwen3VLConfig(
        image_encoder=Qwen3VisionConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            num_attention_heads=4,
            num_position_embeddings=64,
            deepstack_layers=(0, 1),
        ),
        image_projector=Qwen3ProjectorConfig(),
        foundation=Qwen3DecoderConfig(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=80,
            num_attention_heads=8,
            num_query_groups=4,
            kv_channels=16,
            vocab_size=136,
            mrope_section=(4, 2, 2),
            tie_word_embeddings=tied,
        ),
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )


def save_random_hf_model(folder: Path, *, tied: bool) -> Path:
    """As transformers writes it, with norms and biases random as well."""
    reference_model(tiny_config(tied=tied)).save_pretrained(folder)
    return folder


def chunks_of(layout: Layout, *, tied: bool = False, **options: Any) -> list[MultimodalModel]:
    """This rank's chunks, in the parallel state of the moment."""
    model = tiny_config(tied=tied)
    return build_chunks(model, decoder_config(model, layout, **options), layout)
