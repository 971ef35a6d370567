"""Architecture of the projectors. YAML files fill these dataclasses; sizes follow neighbours."""

from dataclasses import dataclass

from loongplug.models.architecture import ProjectorArchitecture


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ProjectorArchitecture):
    """Qwen2-Audio's, and Qwen2.5-Omni's of sounds: a linear of each state; each becomes a token."""


@dataclass(frozen=True, kw_only=True)
class MlpConfig(ProjectorArchitecture):
    """LLaVA's: two linears of each patch; each patch becomes a token."""

    activation: str = "gelu"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class PixelShuffleConfig(ProjectorArchitecture):
    """InternVL's: the patches of a block side by side, a LayerNorm, two linears."""

    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class AveragePoolConfig(ProjectorArchitecture):
    """The mean of a block's patches, two linears."""

    activation: str = "gelu"
    bias: bool = True
