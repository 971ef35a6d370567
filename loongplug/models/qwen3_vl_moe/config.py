"""Architecture of a Qwen3-VL-MoE model. YAML files fill these dataclasses."""

from dataclasses import dataclass

from loongplug.models.qwen3_vl.config import Qwen3DecoderConfig, Qwen3VLConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeDecoderConfig(Qwen3DecoderConfig):
    """The text decoder with experts in every layer.

    ``ffn_hidden_size`` is the width of a dense MLP, which no layer has: it only stands in
    config.json. ``shared_expert_ffn_hidden_size`` is that of all shared experts together, which see
    every token; None for none, as in the published models.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
    shared_expert_ffn_hidden_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """A whole Qwen3-VL-MoE."""

    foundation: Qwen3MoeDecoderConfig
