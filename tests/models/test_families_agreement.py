"""Each family's logits, loss and every gradient against transformers, in every layout; and pairs of
encoders and decoders that no published model has.

The error is relative to the tensor, and for experts to the expert: the largest absolute difference
over the largest absolute value of the reference. It stays below 1e-4 in fp32.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hf_models import Layout
from hf_reference import assert_agrees, reference
from tiny_families import (
    CLIP,
    FAMILIES,
    INTERNVL,
    QWEN2_5_VL,
    QWEN2_AUDIO,
    QWEN3_VL,
    SP,
    TEXT,
    TILED,
    VISION,
    Family,
    hearing,
    llava,
    pictured,
    ragged,
    tied,
)

from loongplug.models.patch_transformer import Dinov2VisionConfig, SiglipVisionConfig
from loongplug.models.projectors import MlpConfig
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.models.text_decoders import (
    LlamaTextConfig,
    MistralTextConfig,
    Qwen2TextConfig,
    Qwen3MoeTextConfig,
    Qwen3TextConfig,
)

LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]
SWEPT = LAYOUTS[1], LAYOUTS[2], LAYOUTS[4]
TP2_PP2 = Layout(tp=2, pp=2)
# What tied embeddings add is the reduction between the first and the last stage, and one weight in
# two places; every feature of a layout meets both.
TIED = [Layout(), TP2_PP2, Layout(pp=2, vpp=2, **SP), *LAYOUTS[-2:]]
QWEN3 = [*LAYOUTS, Layout(**SP), Layout(pp=2), Layout(pp=4), Layout(dp=2, micro_batch_size=2)]
MOE = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(**SP),
    Layout(pp=2, **SP, micro_batch_size=2),
    Layout(pp=2, vpp=2, **SP),
    Layout(dp=2),  # each expert on two ranks
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, dispatcher="allgather"),
    Layout(dp=4, ep=2, overlap_grad_reduce=True),
    Layout(dp=2, ep=2, **SP),  # experts as split as everything else
    Layout(**SP, etp=1),  # whole experts, on both ranks of the tensor parallel group
    Layout(**SP, etp=1, ep=2, dispatcher="allgather"),
    Layout(dp=2, **SP, etp=1, ep=2),
    Layout(dp=2, etp=2),  # experts more split than everything else
    Layout(pp=2, dp=2, ep=2, recompute=True),
    Layout(pp=2, vpp=2, dp=2, ep=2),
]
SCALING = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SEES: dict[str, Any] = VISION | {"feature_layer": -2}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
OTHERS: dict[str, Family] = {
    "qwen3_vl-tied": Family(tied(QWEN3_VL)),
    "qwen2_5_vl-tied": Family(tied(QWEN2_5_VL), ragged),
    "internvl-tied-normed": pictured(
        replace(tied(INTERNVL), image_encoder=replace(INTERNVL.image_encoder, final_norm=True)),
        TILED,
        merge=2,
    ),
    "qwen2_audio-llama": hearing(replace(QWEN2_AUDIO, foundation=LlamaTextConfig(**TEXT))),
    "siglip-qwen3": pictured(
        tied(llava(SiglipVisionConfig(**SEES), Qwen3TextConfig(**TEXT | {"kv_channels": 24})))
    ),
    "dinov2-qwen2": pictured(llava(Dinov2VisionConfig(**SEES), Qwen2TextConfig(**TEXT))),
    "clip-tanh": pictured(
        replace(llava(), image_projector=MlpConfig(bias=False, activation="gelu_pytorch_tanh"))
    ),
    "clip-mistral": pictured(llava(CLIP, MistralTextConfig(**TEXT, sliding_window=4096))),
    "clip-llama3": pictured(llava(CLIP, LlamaTextConfig(**TEXT, rope_scaling=SCALING))),
    "clip-qwen3-moe": pictured(llava(CLIP, Qwen3MoeTextConfig(**TEXT, **EXPERTS))),
}
CASES = [
    *((name, layout) for name in FAMILIES for layout in LAYOUTS if "qwen3" not in name),
    *(("qwen3_vl", layout) for layout in QWEN3),
    *(("qwen3_vl_moe", layout) for layout in MOE),
    *(("qwen3_vl-tied", layout) for layout in TIED),
    *((name, TP2_PP2) for name in OTHERS if name not in ("qwen3_vl-tied", "clip-qwen3-moe")),
    ("clip-qwen3-moe", Layout(ep=2, dp=2)),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the model's name, made once."""

    @cache
    def of(name: str) -> Any:
        family = (FAMILIES | OTHERS)[name]
        folder = tmp_path_factory.mktemp(name)
        return reference(folder, family.model, family.data(), family.arguments)

    return of


def marks(name: str, layout: Layout) -> list[Any]:
    """Layouts that ``tests/verify`` holds against a single rank are swept for most families."""
    swept = layout in SWEPT and name != "internvl" and "qwen3_vl" not in name
    return [pytest.mark.quick] * (layout == Layout()) + [pytest.mark.sweep] * swept


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*case, marks=marks(*case)) for case in CASES], ids=str
)
def test_step_agrees_with_transformers(references: Any, name: str, layout: Layout) -> None:
    assert_agrees(references(name), layout)
