"""Architecture of the decoders of text alone, with plain rope. YAML files fill these dataclasses.

A family puts images before them as before any decoder; of the three axes of positions they use the
first.
"""

from dataclasses import dataclass, replace

from loongplug.models.architecture import TextArchitecture
from loongplug.models.rope_settings import Llama3Scaling, RopeSettings


@dataclass(frozen=True, kw_only=True)
class PlainTextConfig(TextArchitecture):
    """What they have in common; ``rope_scaling`` is for models of longer texts.

    With ``dynamic_rope_factor``, transformers slows the turns down in texts that are longer than
    ``max_position_embeddings``; such rows are refused, all others are as without it.
    """

    rope_scaling: Llama3Scaling | None = None
    dynamic_rope_factor: float | None = None

    def rope(self) -> RopeSettings:
        """With the scaling."""
        return replace(super().rope(), scaling=self.rope_scaling)


@dataclass(frozen=True, kw_only=True)
class LlamaTextConfig(PlainTextConfig):
    """Llama's: GQA without biases, RMSNorm, SwiGLU."""


@dataclass(frozen=True, kw_only=True)
class MistralTextConfig(PlainTextConfig):
    """Mistral's, as Llama's.

    Up to ``sliding_window`` tokens attend to all before them, as they do with None; rows that are
    longer are refused.
    """

    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen2TextConfig(PlainTextConfig):
    """Qwen2's and Qwen2.5's: as Llama's, with biases on q, k and v."""


@dataclass(frozen=True, kw_only=True)
class Qwen3TextConfig(PlainTextConfig):
    """Qwen3's: as Llama's, with norms of q and k."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeTextConfig(PlainTextConfig):
    """Qwen3's with experts in every layer.

    ``ffn_hidden_size`` is the width of a dense MLP, which no layer has: it only stands in
    config.json.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
