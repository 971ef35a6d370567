"""Attention of one tile, its logsumexp and its part of the gradients, against the formula."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from loongplug.models.layers.context import kernels
from loongplug.models.layers.context.kernels import attend, attend_backward

BATCH, HEADS, DIM = 2, 4, 8
SCALES = pytest.mark.parametrize("scale", [None, 0.7])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
CHANNELS = pytest.mark.parametrize("channels", [DIM, 12])  # the second is no multiple of 8
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def drawn(
    size_q: int,
    size_k: int,
    *,
    groups: int,
    dtype: torch.dtype = torch.float64,
    channels: int = DIM,
) -> list[Tensor]:
    """Query, key, value and the output's gradient; different in every entry."""
    generator = torch.Generator().manual_seed(size_q)
    sizes = ((HEADS, size_q), (groups, size_k), (groups, size_k), (HEADS, size_q))
    return [
        torch.randn(BATCH, heads, size, channels, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for heads, size in sizes
    ]


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp in float64, with all scores written out."""
    k, v = (x.double().repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.size(-1)))
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients_by_formula(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = by_formula(*leaves, causal=causal, scale=scale)
    return torch.autograd.grad(out, leaves, grad.double())


def assert_close(ours: Tensor, theirs: Tensor, *, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    difference = (ours.double() - theirs).abs().max()
    assert difference <= tolerance * theirs.abs().max().clamp(min=1), difference


def assert_tile_agrees(tensors: list[Tensor], *, causal: bool, scale: float | None) -> None:
    """Output, logsumexp and gradients of one tile are the formula's."""
    q, k, v, grad = tensors
    out, lse = attend(q, k, v, causal=causal, scale=scale)
    theirs = by_formula(q, k, v, causal=causal, scale=scale)
    for ours, expected in zip((out, lse), theirs, strict=True):
        assert_close(ours, expected, tolerance=TOLERANCE[q.dtype])
    found = attend_backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
    expected_grads = gradients_by_formula(q, k, v, grad, causal=causal, scale=scale)
    for ours, expected in zip(found, expected_grads, strict=True):
        assert ours.dtype == q.dtype
        assert_close(ours, expected, tolerance=TOLERANCE[q.dtype])


@pytest.mark.quick
@SCALES
@GROUPS
@pytest.mark.parametrize(
    ("size_q", "size_k", "causal"),
    [(5, 9, False), (9, 5, False), (6, 6, True), (1, 1, True), (1, 7, False), (70, 70, True)],
)
def test_a_tile_agrees_with_autograd(
    size_q: int, size_k: int, causal: bool, groups: int, scale: float | None
) -> None:
    assert_tile_agrees(drawn(size_q, size_k, groups=groups), causal=causal, scale=scale)


@GROUPS
@CHANNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_kernels_are_called_by_their_schema(
    dtype: torch.dtype, channels: int, groups: int
) -> None:
    """On tensors without values, of a device that need not be there."""
    with FakeTensorMode(), patch.object(kernels, "is_computed_on_host", return_value=False):
        made = drawn(40, 70, groups=groups, dtype=dtype, channels=channels)
        q, k, v, grad = (x.to("cuda") for x in made)
        out, lse = attend(q, k, v, causal=False, scale=None)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
        if dtype == torch.float32 and channels % 8:
            return  # whose backward has to be told a scale, which torch's own shapes do not take
        found = attend_backward(grad, q, k, v, out, lse, causal=False, scale=None)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, dtype) for x in (q, k, v)]


def aligned_only(q: Tensor, *others: Tensor) -> None:
    assert all(x.size(-1) % 8 == 0 for x in (q, *others)), "a kernel of a GPU refuses this"


def like_flash(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What the kernel computes, with its demands, by the CPU's."""
    aligned_only(*tensors)
    with patch.object(kernels, "is_computed_on_host", return_value=True):
        return attend(*tensors, **options)


def like_efficient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    assert q.size(1) == k.size(1), "this kernel knows no groups"
    return like_flash(q, k, v, **options)


def like_flash_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    aligned_only(*tensors[:-1])  # but for the logsumexp
    with patch.object(kernels, "is_computed_on_host", return_value=True):
        return attend_backward(*tensors, **options)


@SCALES
@GROUPS
@CHANNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size_q", "size_k", "causal"), [(5, 9, False), (6, 6, True)])
def test_heads_of_any_size_are_right_without_the_cpus_kernel(
    size_q: int,
    size_k: int,
    causal: bool,
    dtype: torch.dtype,
    channels: int,
    groups: int,
    scale: float | None,
) -> None:
    """Channels that are added change neither scale nor numbers."""
    tensors = drawn(size_q, size_k, groups=groups, dtype=dtype, channels=channels)
    stand_ins: dict[str, Any] = {"_flash": like_flash, "_efficient": like_efficient}
    stand_ins |= {f"{name}_backward": like_flash_backward for name in stand_ins}
    with patch.multiple(kernels, is_computed_on_host=lambda q: False, **stand_ins):
        assert_tile_agrees(tensors, causal=causal, scale=scale)


@pytest.mark.gpu
@GROUPS
@SCALES
@CHANNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size_q", "size_k", "causal"), [(40, 70, False), (70, 70, True)])
def test_a_gpus_kernels_agree_with_the_formula(
    size_q: int,
    size_k: int,
    causal: bool,
    dtype: torch.dtype,
    channels: int,
    scale: float | None,
    groups: int,
) -> None:
    drawn_here = drawn(size_q, size_k, groups=groups, dtype=dtype, channels=channels)
    assert_tile_agrees([x.to("cuda") for x in drawn_here], causal=causal, scale=scale)
