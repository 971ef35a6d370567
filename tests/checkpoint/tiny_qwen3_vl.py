"""A tiny Qwen3-VL, random in transformers and built by us, for the checkpoint tests."""

from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import Qwen3VLForConditionalGeneration

from loongplug.models.decoder import DecoderConfig
from loongplug.models.hf_config import hf_config
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen3_vl.config import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)
from loongplug.models.registry import families

FAMILY = families()["qwen3_vl"]
hugging_face = FAMILY.load_hugging_face


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
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(hf_config(hugging_face(tiny_config(tied=tied))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def build_chunks(
    config: Qwen3VLConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[MultimodalModel]:
    """This rank's chunks, in the parallel state of the moment."""
    text = config.foundation
    decoder = DecoderConfig(
        num_layers=text.num_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.ffn_hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_query_groups,
        kv_channels=text.kv_channels,
        mrope_section=list(text.mrope_section),
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = (vpp or 1) - 1
    return [
        FAMILY.load_builder(config)(
            config,
            decoder,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == pp - 1 and chunk == last,
            vp_stage=chunk if vpp else None,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            backend="local",
        )
        for chunk in range(vpp or 1)
    ]
