"""Products of matrices: on the host, large ones by oneDNN.

Of float32, torch leaves them to MKL, which an AMD EPYC takes twice as long for as for those of
oneDNN, which torch has as well. oneDNN's price is some 0.3 ms for the first product of each shape,
so that small ones stay with MKL. Which products are large is a matter of their sizes alone, so that
a run's bits do not depend on what ran before; a linear's product, that for its input's gradient
and that for its weight's have one size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loongplug.platform.devices import is_computed_on_host
from loongplug.platform.torch_kernels import onednn_product

_KERNEL = onednn_product()
# Multiplications, of 70 us by MKL: ten products pay for the first of their shape.
_LARGE = 1 << 22


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch's: [..., in] by [out, in], and [out] or None, to [..., out]."""
    if not _is_large(x, weight.t()):
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def mm(rows: Tensor, matrix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As torch's, without a graph behind it: [m, k] by [k, n] to [m, n], in ``out`` if given."""
    if not _is_large(rows, matrix):
        return torch.mm(rows, matrix, out=out)
    product = _onednn(rows, matrix.t())
    return product if out is None else out.copy_(product)


def _is_large(rows: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN takes [..., k] by [k, n]."""
    return (
        rows.dtype == matrix.dtype == torch.float32
        and rows.numel() * matrix.size(1) >= _LARGE
        and not rows.is_meta
        and is_computed_on_host(rows)
        and _KERNEL is not None
    )


def _onednn(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, k] by [n, k], and [n], to [m, n]."""
    assert _KERNEL is not None, "no product is large without it"
    product: Tensor = _KERNEL(_dense(rows), _dense(matrix), bias, "none", [], "")
    return product


def _dense(matrix: Tensor) -> Tensor:
    """As it is where rows or columns lie behind each other; the kernel knows no other strides."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _Linear(torch.autograd.Function):
    """A large linear, whose gradients are large products, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return _onednn(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return (
            None if weight is None else mm(rows, weight).view(*gradient.shape[:-1], -1),
            None if x is None else mm(rows.t(), x.flatten(0, -2)),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )
