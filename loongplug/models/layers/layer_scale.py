"""Layer scale: a trained factor for each channel of what attention and MLP add to the residual."""

from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

Added = tuple[Tensor, Tensor | None]  # an output, and the bias that is left to add


class ScaledResidual(nn.Module):
    """In the place of Megatron's bias, dropout and addition: bias, factor and addition.

    ``weight`` is [hidden], the same on every tensor parallel rank, whose gradient is too: it
    multiplies what has been reduced over them. No dropout, and no sequence parallelism.
    """

    def __init__(self, *, hidden_size: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), start))

    def forward(self, training: bool, fused: bool) -> Callable[[Added, Tensor, float], Tensor]:
        """The addition, as Megatron's layer calls it with output, residual and dropout."""

        def add(added: Added, residual: Tensor, dropout: float) -> Tensor:
            assert dropout == 0.0, "an encoder has none"
            output, bias = added
            if bias is not None:
                output = output + bias
            return torch.addcmul(residual, output, self.weight)

        return add


def with_layer_scale(spec: ModuleSpec, *, hidden_size: int, start: float) -> ModuleSpec:
    """The layer of ``spec`` with factors that begin at ``start``."""
    submodules = spec.submodules
    assert isinstance(submodules, TransformerLayerSubmodules)
    scaled = ModuleSpec(module=ScaledResidual, params={"hidden_size": hidden_size, "start": start})
    return replace(spec, submodules=replace(submodules, self_attn_bda=scaled, mlp_bda=scaled))
