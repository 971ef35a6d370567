"""Large products by oneDNN: values and gradients are torch's, and small ones are left to torch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loongplug.models.layers import linear

pytestmark = pytest.mark.quick

TOKENS, IN, OUT = 37, 24, 40
WAYS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "slice": lambda x: torch.cat([x, x], dim=1)[:, : x.size(1)],
    "every other": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "one row again and again": lambda x: x[:1].expand_as(x),
}


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """All products are large; those that oneDNN is given, [m, k, n]."""
    taken: list[tuple[int, ...]] = []
    kernel = linear._onednn

    def looked_at(rows: Tensor, matrix: Tensor, *bias: Any) -> Tensor:
        taken.append((*rows.shape, len(matrix)))
        return kernel(rows, matrix, *bias)

    monkeypatch.setattr(linear, "_LARGE", 1)
    monkeypatch.setattr(linear, "_onednn", looked_at)
    yield taken
    assert taken, "oneDNN was given nothing"


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("left", WAYS)
@pytest.mark.parametrize("right", WAYS)
def test_products_are_right_however_matrices_lie(
    left: str, right: str, by_onednn: list[tuple[int, ...]]
) -> None:
    rows, matrix = WAYS[left](drawn(TOKENS, IN)), WAYS[right](drawn(IN, OUT))
    exact = (rows.double() @ matrix.double()).float()
    given = torch.full((TOKENS, OUT), float("nan"))
    product = linear.fast_mm(rows, matrix)
    assert linear.fast_mm(rows, matrix, out=given) is given
    torch.testing.assert_close(product, exact, rtol=1e-6, atol=1e-5)
    assert torch.equal(given, product)
    assert by_onednn == [(TOKENS, IN, OUT)] * 2


def everything(
    linear: Any, *, bias: bool, frozen: str, spread: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Output, and the gradients of input, weight and bias."""
    x = drawn(TOKENS, 3, IN).transpose(0, 1) if spread else drawn(3, TOKENS, IN)
    leaves = [x, drawn(OUT, IN), drawn(OUT)][: 3 if bias else 2]
    for name, leaf in zip(("input", "weight", "bias"), leaves, strict=False):
        leaf.requires_grad_(name != frozen)
    output = linear(*leaves, *([] if bias else [None]))
    # Of a sum, gradients are one value again and again.
    (output.sum() if spread else (output * drawn(3, TOKENS, OUT)).sum()).backward()
    return output.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("frozen", ["nothing", "input", "weight", "bias"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_large_linear_has_torchs_output_and_gradients(
    frozen: str, *, bias: bool, spread: bool, by_onednn: list[tuple[int, ...]]
) -> None:
    found = everything(linear.fast_linear, bias=bias, frozen=frozen, spread=spread)
    expected = everything(F.linear, bias=bias, frozen=frozen, spread=spread)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    # What is frozen has no product.
    assert len(by_onednn) == 3 - (frozen in ("input", "weight"))


def test_products_of_a_linear_are_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(TOKENS, IN), drawn(OUT, IN)
    of_output = drawn(TOKENS, OUT)
    for large in (TOKENS * IN * OUT, TOKENS * IN * OUT + 1):
        monkeypatch.setattr(linear, "_LARGE", large)
        three = ((x, weight.t()), (of_output, weight), (of_output.t(), x))
        assert {linear._is_large(*each) for each in three} == {large == TOKENS * IN * OUT}


def test_others_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*_: object) -> Tensor:
        raise AssertionError("given to oneDNN")

    monkeypatch.setattr(linear, "_onednn", untouched)
    x, weight = drawn(TOKENS, IN), drawn(OUT, IN)
    assert torch.equal(linear.fast_linear(x, weight, None), F.linear(x, weight))
    monkeypatch.setattr(linear, "_LARGE", 1)
    half, empty = x.bfloat16(), x[:0]
    assert torch.equal(
        linear.fast_linear(half, weight.bfloat16(), None), F.linear(half, weight.bfloat16())
    )
    assert linear.fast_mm(empty, weight.t()).shape == (0, OUT)
    assert linear.fast_linear(x.to("meta"), weight.to("meta"), None).is_meta
    with monkeypatch.context() as patched:
        patched.setattr(linear, "_KERNEL", None)  # a torch without oneDNN
        assert torch.equal(linear.fast_linear(x, weight, None), F.linear(x, weight))
    monkeypatch.setattr(linear, "is_computed_on_host", lambda _: False)
    assert torch.equal(linear.fast_linear(x, weight, None), F.linear(x, weight))
