"""Megatron's parallel linears, without the machinery of parallelism where a rank is alone; and such
whose weights' gradients are computed when a schedule asks for them, not in backward.

Large products of float32 are oneDNN's on the host. torch leaves them to MKL, which an AMD EPYC
takes twice as long for. oneDNN's price is some 0.3 ms for the first product of each shape, so that
small ones stay with MKL. Which products are large is a matter of their sizes alone, so that a run's
bits do not depend on what ran before; a linear's product, that for its input's gradient and that
for its weight's have one size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from loongplug.platform.devices import is_computed_on_host
from loongplug.platform.torch_kernels import onednn_product

_KERNEL = onednn_product()
# Multiplications, of 70 us by MKL: ten products pay for the first of their shape.
_LARGE = 1 << 22


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear: [..., in] by [out, in], and [out] or None, to [..., out]."""
    if not _is_large(x, weight.t()):
        return F.linear(x, weight, bias)
    return _LargeProduct.apply(x, weight, bias)


def fast_mm(rows: Tensor, matrix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch's product without a graph: [m, k] by [k, n] to [m, n], in ``out`` if given."""
    if not _is_large(rows, matrix):
        return torch.mm(rows, matrix, out=out)
    product = _onednn(rows, matrix.t())
    return product if out is None else out.copy_(product)


def _is_large(rows: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN takes [..., k] by [k, n]."""
    return (
        rows.dtype == matrix.dtype == torch.float32
        and rows.numel() * matrix.size(1) >= _LARGE
        and is_computed_on_host(rows)
        and not rows.is_meta
        and _KERNEL is not None
    )


def _onednn(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, k] by [n, k], and [n], to [m, n]."""
    assert _KERNEL is not None, "no product is large without it"
    return _KERNEL(_dense(rows), _dense(matrix), bias, "none", [], "")


def _dense(matrix: Tensor) -> Tensor:
    """The matrix with rows or columns behind each other; the kernel knows no other strides."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _LargeProduct(torch.autograd.Function):
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
            None if weight is None else fast_mm(rows, weight).view(*gradient.shape[:-1], -1),
            None if x is None else fast_mm(rows.t(), x.flatten(0, -2)),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


class LocalColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that is a plain linear in a tensor-parallel group of one.

    Upstream's Python autograd functions order communication against computation; with nothing
    to communicate, torch's own linear gives the same numbers for less, and takes the bias into
    the same kernel. So a bias that upstream would hand back to be added (``skip_bias_add``) is
    already in the output then, and None comes back in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A fused bias and activation wants the bias apart.
        apart = self.skip_bias_add and getattr(self.config, "bias_activation_fusion", False)
        self.plain = _is_alone(self) and not apart and not self.config.defer_embedding_wgrad_compute

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, in] -> [s, b, out / tp] and the bias that is left to add, or None."""
        if not self.plain:
            return super().forward(input_, weight, runtime_gather_output)
        return self._plain_product(input_, self.weight if weight is None else weight), None

    def _plain_product(self, input_: Tensor, weight: Tensor) -> Tensor:
        return fast_linear(input_, weight, self.bias)


class LocalRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that is a plain linear in a tensor-parallel group of one.

    See :class:`LocalColumnParallelLinear`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = _is_alone(self)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, in / tp] -> [s, b, out] and the bias that is left to add, or None."""
        if not self.plain:
            return super().forward(input_)
        return self._plain_product(input_, self.weight), None

    def _plain_product(self, input_: Tensor, weight: Tensor) -> Tensor:
        return fast_linear(input_, weight, self.bias)


def _is_alone(linear: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether nothing but the product is asked of ``linear``."""
    return (
        linear.tp_group.size() == 1
        and linear.gtp_remat_size == 1
        and not linear.gradient_accumulation_fusion
        and not getattr(linear.config, "cpu_offloading", False)
    )


class DelayedGradient(nn.Module):
    """The delayed gradient of a weight, the same in columns and rows.

    Backward computes the gradients of input and bias, and keeps what the weight's is made of;
    :meth:`backward_dw` makes it, bit by bit the one of the ordinary linear. The two take turns: a
    schedule asks for the weight's gradient of one microbatch before the backward of the next. A
    weight that is frozen has none, and nothing is kept for it.

    Data parallel wrappers leave such a weight to its module: what they do with a gradient is
    handed to :meth:`register_wgrad_accumulation_and_reduce_hooks`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    tp_group: ProcessGroup
    plain: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known: Any = self
        assert not known.gradient_accumulation_fusion, "the fused kernel is the backward's"
        assert known.gtp_remat_size == 1, "a weight that is gathered again"
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        # Of the last backward: the input (a rank's part of it, with sequence parallelism in front
        # of columns), and the gradient of the product.
        self._kept: tuple[Tensor, Tensor] | None = None
        self._gathers = False  # whether the input is such a part
        self._hooks: list[Callable[[], None]] = []

    @property
    def waits(self) -> bool:
        """Whether a backward has left a weight's gradient to be computed."""
        return self._kept is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called whenever the weight's gradient has been computed."""
        self._hooks.append(hook)

    def keep(self, input_: Tensor, gradient: Tensor, *, gathers: bool) -> None:
        """Keep what a backward was given, until the weight's gradient is made of it."""
        assert self._kept is None, "two backwards, and no gradient of the weight between them"
        self._kept, self._gathers = (input_, gradient), gathers

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight's gradient of the microbatch that went backward last.

        Collective with sequence parallelism, in columns: the tensor parallel group gathers the
        input once more.
        """
        if not self.weight.requires_grad:
            return
        assert self._kept is not None, "the gradient of a weight without a backward before it"
        (input_, gradient), self._kept = self._kept, None
        if self._gathers:
            input_ = _gathered(input_, self.tp_group)
        product = fast_mm if self.plain else torch.mm
        of_weight = product(self.rows(gradient).t(), self.rows(input_))  # the weight's shape
        if self.weight.grad is None:
            self.weight.grad = of_weight
        else:
            self.weight.grad.add_(of_weight)
        for hook in self._hooks:
            hook()

    def rows(self, values: Tensor) -> Tensor:
        """[s, b, width] to [s * b, width], laid out as the ordinary linear has it in backward."""
        return (values if self.plain else values.contiguous()).flatten(0, -2)

    def _plain_product(self, input_: Tensor, weight: Tensor) -> Tensor:
        if not weight.requires_grad:
            return fast_linear(input_, weight, self.bias)
        return self._product(input_, weight, self.bias, gathers=False, sums=False)

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if not weight.requires_grad:
            return super()._forward_impl(input, weight, **options)  # type: ignore[misc]
        return self._product(
            input,
            weight,
            options["bias"],
            gathers=options["sequence_parallel"],
            sums=options["allreduce_dgrad"],
        )

    def _product(
        self, input_: Tensor, weight: Tensor, bias: Tensor | None, *, gathers: bool, sums: bool
    ) -> Tensor:
        assert weight is self.weight, "the gradient is kept for the module's own weight"
        return _Product.apply(input_, weight, bias, self, gathers, sums)


class DelayedColumnParallelLinear(DelayedGradient, LocalColumnParallelLinear):
    """LocalColumnParallelLinear whose weight's gradient can wait: :class:`DelayedGradient`."""


class DelayedRowParallelLinear(DelayedGradient, LocalRowParallelLinear):
    """LocalRowParallelLinear whose weight's gradient can wait: :class:`DelayedGradient`."""


class _Product(torch.autograd.Function):
    """The ordinary linear's product and what of its backward is not delayed.

    Products are those of the ordinary linear where a rank is alone, and Megatron's elsewhere:
    written in another way, a product may round in another way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: DelayedGradient,
        gathers: bool,
        sums: bool,
    ) -> Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.linear, ctx.gathers, ctx.sums = linear, gathers, sums
        if linear.plain:
            return fast_linear(input_, weight, bias)
        if gathers:
            input_ = _gathered(input_, linear.tp_group)
        product = input_.matmul(weight.t())
        return product if bias is None else product + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        linear: DelayedGradient = ctx.linear
        linear.keep(input_, gradient, gathers=ctx.gathers)
        if linear.plain:
            of_input = fast_mm(linear.rows(gradient), weight).view(input_.shape)
        else:
            of_input = gradient.matmul(weight)  # [s, b, in], with all parts of the sequence
        if ctx.gathers:
            of_input = reduce_scatter_to_sequence_parallel_region(of_input, group=linear.tp_group)
        elif ctx.sums:
            of_input = reduce_from_tensor_model_parallel_region(of_input, group=linear.tp_group)
        of_bias = linear.rows(gradient).sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None, None, None


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """[s / tp, b, in] to [s, b, in], in a buffer that the next linear uses again."""
    return gather_from_sequence_parallel_region(part, group=group, use_global_buffer=True)
