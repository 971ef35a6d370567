"""One linear of all experts at once: one node of the graph, and one activation behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from loongplug.models.layers.linear import (
    DelayedGradient,
    LocalColumnParallelLinear,
    LocalRowParallelLinear,
    fast_mm,
)
from loongplug.platform.devices import to_device
from loongplug.platform.torch_kernels import CAPABILITY, GROUPED_ALIGNMENT, grouped_product

# What data parallelism hangs in front of every module waits for its weights, and takes no input.
_DATA_PARALLEL = "megatron.core.distributed."


def joinable(experts: Sequence[MLP]) -> bool:
    """Whether the linears of ``experts`` are this package's, and nothing but products.

    Quantized products and the fused sum of gradients are of one weight at a time.
    """
    config = experts[0].config
    if config.fp8 or config.fp4 or getattr(config, "cpu_offloading", False):
        return False
    return all(
        isinstance(linear, LocalColumnParallelLinear | LocalRowParallelLinear)
        and linear.bias is None
        and linear.gtp_remat_size == 1
        and not linear.gradient_accumulation_fusion
        for linear in _linears(experts)
    )


def watched(experts: Sequence[MLP]) -> bool:
    """Whether somebody looks at what a linear is given or gives, such as an adapter beside it."""
    return any(
        linear._forward_hooks
        or any(
            not hook.__module__.startswith(_DATA_PARALLEL)
            for hook in linear._forward_pre_hooks.values()
        )
        for linear in _linears(experts)
    )


def kernel_takes(experts: Sequence[MLP], tokens: Tensor) -> bool:
    """Whether torch's grouped product has a kernel for these weights and ``tokens``.

    Elsewhere it is a loop, to which the weights would have been copied for nothing.
    """
    return (
        tokens.is_cuda
        and tokens.dtype == torch.bfloat16
        and all(
            weight.dtype == tokens.dtype
            and all(size % GROUPED_ALIGNMENT == 0 for size in weight.shape)
            for weight in (linear.weight for linear in _linears(experts[:1]))
        )
        and grouped_product() is not None
        and torch.cuda.get_device_capability(tokens.device) >= CAPABILITY
    )


def _linears(experts: Sequence[MLP]) -> Iterator[Any]:
    for each in experts:
        yield each.linear_fc1
        yield each.linear_fc2


@dataclass(frozen=True)
class Groups:
    """The tokens of each expert, which stand one after the other.

    With ``ends`` ([experts] int32, where each expert's tokens end, on their device) torch's kernel
    computes all products at once; it wants the weights in one tensor and so in a copy, which lives
    as long as the product. Without, they are computed one by one into one tensor.
    """

    counts: tuple[int, ...]
    ends: Tensor | None

    @classmethod
    def of(cls, counts: Sequence[int], tokens: Tensor, *, kernel: bool) -> Self:
        """The groups of ``tokens`` [tokens, hidden]; the kernel takes no empty operands."""
        ends = None
        if kernel and len(tokens):
            ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
            ends = to_device(ends, tokens.device)
        return cls(tuple(counts), ends)

    def forward(self, tokens: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """[tokens, in] by [out, in] of each expert: [tokens, out]."""
        if self.ends is not None:
            return F.grouped_mm(tokens, torch.stack(list(weights)).transpose(1, 2), offs=self.ends)
        return self._one_by_one(tokens, [weight.t() for weight in weights])

    def back(self, gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """[tokens, out] by [out, in] of each expert: [tokens, in]."""
        if self.ends is not None:
            return F.grouped_mm(gradient, torch.stack(list(weights)), offs=self.ends)
        return self._one_by_one(gradient, weights)

    def _one_by_one(self, tokens: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        result = tokens.new_empty(len(tokens), matrices[0].shape[1])
        for part, matrix, out in zip(
            tokens.split(self.counts), matrices, result.split(self.counts), strict=True
        ):
            if len(part):
                fast_mm(part, matrix, out=out)
        return result

    def of_weights(
        self, tokens: Tensor, gradient: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """[tokens, in] and [tokens, out] to [out, in] of each expert that it is ``wanted`` of.

        Zeros of an expert without tokens, whatever the kernel makes of none.
        """
        if self.ends is None or not any(wanted):
            return [
                fast_mm(part.t(), given) if want else None
                for part, given, want in zip(
                    gradient.split(self.counts), tokens.split(self.counts), wanted, strict=True
                )
            ]
        together = F.grouped_mm(gradient.t(), tokens, offs=self.ends).unbind()
        return [
            (each if count else torch.zeros_like(each)) if want else None
            for each, count, want in zip(together, self.counts, wanted, strict=True)
        ]


class JoinedExperts(MLP):
    """``experts`` as one MLP over the tokens of all of them, with upstream's activation.

    Outputs and gradients are those of the experts one by one: without the kernel bit by bit, up to
    what an activation rounds in another way at another place of its tensor.
    Weights stay the experts' own, under their names: this holds no parameters, and is made anew
    for every ``groups``. Experts must be :func:`joinable` and not :func:`watched`.
    """

    def __init__(self, experts: Sequence[MLP], groups: Groups) -> None:
        nn.Module.__init__(self)
        self.config = experts[0].config
        self.activation_func = experts[0].activation_func
        self.linear_fc1 = _JoinedLinear([each.linear_fc1 for each in experts], groups)
        self.linear_fc2 = _JoinedLinear([each.linear_fc2 for each in experts], groups)


class _JoinedLinear(nn.Module):
    def __init__(self, linears: Sequence[Any], groups: Groups) -> None:
        super().__init__()
        self._linears = tuple(linears)  # not as modules of this one
        self._groups = groups

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """[tokens, in] -> [tokens, out], and no bias."""
        for linear in self._linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        weights = [linear.weight for linear in self._linears]
        product: Tensor = _Product.apply(tokens.contiguous(), self._groups, self._linears, *weights)
        return product, None


class _Product(torch.autograd.Function):
    """Weights' gradients that can wait (:class:`DelayedGradient`) are left to their linears."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, groups: Groups, linears: tuple[nn.Module, ...], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tokens, *weights)
        ctx.groups, ctx.linears = groups, linears
        return groups.forward(tokens, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        tokens, *weights = ctx.saved_tensors
        groups: Groups = ctx.groups
        gradient = gradient.contiguous()
        of_tokens = groups.back(gradient, weights) if ctx.needs_input_grad[0] else None
        wanted = list(ctx.needs_input_grad[3:])
        parts = zip(tokens.split(groups.counts), gradient.split(groups.counts), strict=True)
        for number, (linear, part) in enumerate(zip(ctx.linears, parts, strict=True)):
            if wanted[number] and isinstance(linear, DelayedGradient):
                linear.keep(*part, gathers=False)
                wanted[number] = False
        return of_tokens, None, None, *groups.of_weights(tokens, gradient, wanted)
