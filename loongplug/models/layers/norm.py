"""Norms that any machine can run and that know sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter


class _Norm(torch.nn.Module):
    """A norm's weight per channel, with the mark that Megatron reduces by."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = self._parameter(1.0)

    def _parameter(self, value: float) -> Parameter:
        # None: the CPU, unless the caller has set torch's default device (meta, to count sizes).
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = Parameter(
            torch.full((self.hidden_size,), value, device=device, dtype=self.config.params_dtype)
        )
        # Each tensor-parallel rank norms its own tokens, so Megatron has to sum this gradient
        # over the group; it finds such parameters by this attribute.
        parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter


class RMSNorm(_Norm):
    """Root-mean-square norm over the last dimension, [..., hidden] -> [..., hidden].

    The statistics are float32 whatever the input's dtype, and the weight multiplies after the
    result is cast back to it (within torch's fused kernel on CUDA). No collectives.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Norm ``x``; same shape and dtype."""
        if x.is_cuda:
            return F.rms_norm(x, (self.hidden_size,), self.weight, self.eps)
        return _HostRMSNorm.apply(x, self.weight, self.eps)


class LayerNorm(_Norm):
    """Layer norm over the last dimension, [..., hidden] -> [..., hidden].

    The statistics are float32 whatever the input's dtype. No collectives.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Norm ``x``; same shape and dtype."""
        return F.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)


class _HostRMSNorm(torch.autograd.Function):
    """RMS norm in few passes over memory, which is what a norm costs on the CPU.

    torch composes its CPU rms_norm, and its gradient, of twice as many operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(wide, scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        hidden = x.size(-1)
        wide, wide_weight = grad.float(), weight.float()
        normed = torch.mul(x, scale)
        product = torch.mul(wide, normed).reshape(-1, hidden)
        grad_weight = product.sum(0).to(weight.dtype)
        # The part of the gradient that changes the length of x is what the norm takes away.
        along = torch.mv(product, wide_weight).div_(-hidden).reshape(scale.shape)
        grad_x = torch.mul(wide, wide_weight).addcmul_(normed, along).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
