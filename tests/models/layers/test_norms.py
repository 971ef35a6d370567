"""The norms against their formulas, and the mark that Megatron reduces gradients by."""

import pytest
import torch
from layer_configs import decoder_config
from torch import Tensor

from loongplug.models.layers.norm import LayerNorm, RMSNorm

pytestmark = pytest.mark.quick

HIDDEN = 24


def rms_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add(eps).rsqrt()
    return weight * (wide * scale).to(x.dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(decoder_config(), HIDDEN, eps=eps)
    norm.weight.data = random(HIDDEN, seed=1) + 1
    return norm


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    difference = (ours.double() - theirs.double()).abs().max() / theirs.abs().max()
    assert difference <= tolerance, difference


def assert_gradients(
    norm: torch.nn.Module, x: Tensor, expected: Tensor, *, tolerance: float
) -> None:
    weights = random(*expected.shape, seed=5)
    over = (x, *norm.parameters())
    ours = torch.autograd.grad((norm(x) * weights).sum(), over)
    theirs = torch.autograd.grad((expected * weights).sum(), over)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm_agrees_with_its_formula_in_double(eps: float) -> None:
    x = random(5, 3, HIDDEN).requires_grad_()
    norm = rms_norm(eps)
    wide = x.double()
    expected = norm.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    assert_close(norm(x), expected, 1e-6)
    assert_gradients(norm, x, expected, tolerance=2e-6)


def test_rms_norm_takes_the_slices_of_a_head_dimension() -> None:
    mixed = random(5, 3, 2, 3 * HIDDEN)
    x = mixed.split(HIDDEN, dim=-1)[1].requires_grad_()  # not contiguous
    norm = rms_norm()
    expected = rms_formula(x, norm.weight, norm.eps)
    assert_close(norm(x), expected, 1e-6)
    assert_gradients(norm, x, expected, tolerance=2e-6)
    turned = random(3, HIDDEN, 5).transpose(1, 2).requires_grad_()
    assert_gradients(norm, turned, rms_formula(turned, norm.weight, norm.eps), tolerance=2e-6)


def test_rms_norm_in_bfloat16_rounds_where_the_formula_does() -> None:
    x = random(64, HIDDEN).bfloat16().requires_grad_()
    norm = rms_norm().bfloat16()
    expected = rms_formula(x, norm.weight, norm.eps)
    result = norm(x)
    assert result.dtype == torch.bfloat16
    # The same roundings at the same places; a statistic may differ in its last bit.
    assert (result != expected).float().mean() < 0.01
    assert_gradients(norm, x, expected, tolerance=2e-2)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_parameters_are_marked_start_neutral_and_have_the_configs_dtype(
    make: type[RMSNorm], parallel: bool
) -> None:
    tp = 2 if parallel else 1
    config = decoder_config(
        tensor_model_parallel_size=tp, sequence_parallel=parallel, params_dtype=torch.bfloat16
    )
    # called as TransformerLayer and TransformerBlock call it
    norm = make(config=config, hidden_size=HIDDEN, eps=1e-6)
    for name, parameter in norm.named_parameters():
        assert parameter.sequence_parallel is parallel
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.data, torch.full_like(parameter, float(name == "weight")))
