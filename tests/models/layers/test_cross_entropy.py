"""Each token's loss against torch's, over ranks and slices, and what it makes of logits."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as upstream
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loongplug.models import decoder
from loongplug.models.decoder import vocab_parallel_cross_entropy

pytestmark = pytest.mark.quick

S, B, WORDS = 7, 3, 24


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is made meanwhile, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, made.numel())
        return made


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, words], far apart, labels [s, b], and the gradient of each loss."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(S, B, WORDS, generator=generator) * 30).to(dtype)
    labels = torch.randint(0, WORDS, (S, B), generator=generator)
    labels[0, 0], labels[0, 1], labels[0, 2] = 0, WORDS - 1, WORDS // 2
    return logits, labels, torch.randn(S, B, generator=generator)


def lost(rank: int, *, dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor]:
    """A rank's losses, and the gradient of its part of the logits."""
    logits, labels, grad = drawn(dtype)
    group = dist.group.WORLD
    assert group is not None
    own = logits.chunk(dist.get_world_size(), dim=-1)[rank].contiguous()
    leaf = own.clone().requires_grad_()
    at_a_time = 4 * own.size(-1) * tokens
    with patch.object(decoder, "_AT_A_TIME", at_a_time):
        # The backward writes over what it is given.
        loss = vocab_parallel_cross_entropy(leaf * 1, labels, group=group)
        loss.backward(grad.to(loss.dtype))
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("tokens", [1, 4, S * B], ids="{0}-at-a-time".format)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_and_gradients_are_those_of_torch(
    ranks: int, dtype: torch.dtype, tokens: int
) -> None:
    logits, labels, grad = drawn(dtype)
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected.backward(grad.flatten().to(dtype))
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    found = run_ranks(lost, ranks, dtype=dtype, tokens=tokens)
    for loss, _ in found:
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.flatten(), expected, rtol=tolerance, atol=tolerance)
    gradient = torch.cat([each for _, each in found], dim=-1)
    torch.testing.assert_close(gradient, logits.grad, rtol=tolerance, atol=tolerance)


def of_both(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, gradient = lost(rank, dtype=torch.bfloat16, tokens=5)
    logits, labels, grad = drawn(torch.bfloat16)
    leaf = logits.requires_grad_()
    expected = upstream(leaf * 1, labels, tp_group=dist.group.WORLD)
    expected.backward(grad)
    assert leaf.grad is not None
    return loss, expected.detach(), gradient, leaf.grad


def test_of_logits_in_bf16_it_is_what_megatron_makes() -> None:
    ((loss, expected, gradient, expected_gradient),) = run_ranks(of_both, 1)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2**-7, atol=1e-6)


def in_the_backward(rank: int) -> int:
    """The most elements that the backward makes at once, in the place of the logits' many."""
    logits, labels, grad = drawn(torch.bfloat16)
    leaf = logits.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    given = leaf * 1
    with patch.object(decoder, "_AT_A_TIME", 4 * WORDS * 2), Largest() as largest:
        loss = vocab_parallel_cross_entropy(given, labels, group=group)
        (gradient,) = torch.autograd.grad(loss, given, grad)
    assert gradient.data_ptr() == given.data_ptr()
    return largest.elements


def test_no_second_tensor_of_all_logits_is_made() -> None:
    assert run_ranks(in_the_backward, 1) == [2 * WORDS]
