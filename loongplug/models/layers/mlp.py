"""The dense MLP of machines without TransformerEngine."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class LocalMLP(MLP):
    """Megatron's MLP with a SwiGLU that does not stitch its gradient together.

    Used where ``config`` asks for SwiGLU and no fused kernel (``bias_activation_fusion``);
    everything else is upstream's. Without a compiler, as on the CPU, the fused kernel runs
    operation by operation and is the slowest of the three.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.plain_swiglu = (
            config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0.0
            and not config.bias_activation_fusion
            and not config.use_te_activation_func
        )

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] -> [s, b, hidden] and the bias that is left to add, or None."""
        if not self.plain_swiglu or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate_up, bias = self.linear_fc1(hidden_states)  # [s, b, 2 * ffn / tp]
        if bias is not None:
            gate_up = gate_up + bias
        return self.linear_fc2(swiglu(gate_up))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the halves of the last dimension, [..., 2 * ffn] -> [..., ffn]."""
    result: Tensor = _SwiGLU.apply(gate_up)
    return result


class _SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient where they belong; autograd would concatenate them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
