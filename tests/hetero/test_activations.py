"""What the encoder's backward needs, on the host meanwhile: the same gradients, memory let go."""

import pytest
import torch
from lazy_copies import LazyCopies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loongplug.hetero import encoder_state
from loongplug.hetero.encoder_state import addresses, movable_saves
from loongplug.platform.copies import Copies, CudaCopies, HostCopies
from loongplug.platform.prefetch import Movable, PrefetchQueue

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
ROWS = [40, 7, 25, 33]


class Encoder(nn.Module):
    """Saves views of one storage, a result, an input and weights of any size."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patches = nn.Linear(16, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.recompute = recompute

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.patches(pixels)
        if self.recompute:
            return checkpoint(self.layer, hidden, use_reentrant=True)
        return self.layer(hidden)

    def layer(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=1)
        return torch.tanh(self.out((query * key).softmax(dim=1) * value)) + hidden


def pixels(unit: int) -> Tensor:
    return torch.randn(ROWS[unit], 16, generator=torch.Generator().manual_seed(unit))


def encoded(encoder: Encoder, unit: int) -> tuple[Tensor, list[Movable]]:
    stays = addresses(encoder.parameters())
    with movable_saves(device=CPU, stays=stays) as saved:
        output = encoder(pixels(unit))
    return output, list(saved.values())


def gradients(copies: Copies | None, *, recompute: bool = False) -> Tensor:
    """Of all weights, all units encoded before the first goes backward."""
    encoder = Encoder(recompute=recompute)
    queue = None if copies is None else PrefetchQueue(copies)
    outputs = {}
    for unit in range(len(ROWS)):
        if queue is None:
            outputs[unit] = encoder(pixels(unit))
        else:
            outputs[unit], saved = encoded(encoder, unit)
            queue.leave({unit: saved})
            queue.let_go(unit)
    for unit, output in outputs.items():
        if queue is not None:
            queue.take(unit)
        output.backward(torch.full_like(output, unit + 1))
    return torch.cat([each.grad.flatten() for each in encoder.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("copies", [LazyCopies, HostCopies, CudaCopies])
def test_gradients_are_those_of_activations_that_stay(copies, recompute):
    expected = gradients(None, recompute=recompute)
    assert torch.equal(gradients(copies(), recompute=recompute), expected)


@pytest.mark.parametrize("small", [1, 64 * 40 + 1])
def test_each_storage_is_saved_once_and_what_stays_is_not(monkeypatch, small):
    """However many views of it were saved: not weights, not inputs that stay, not what is small."""
    monkeypatch.setattr(encoder_state, "_SMALL", small)
    encoder, given = Encoder(recompute=False), pixels(0)
    inputs = addresses([given])
    weights = addresses(encoder.parameters())
    with movable_saves(device=CPU, stays=weights) as saved:
        torch.autograd.graph.get_gradient_edge(encoder(given))
    # Of [rows, 16] each: pixels, patches, softmax, the product behind it, tanh; qkv is of three.
    one = 16 * 4 * ROWS[0]
    expected = [one] * 5 + [3 * one] if small == 1 else [3 * one]
    assert sorted(each.device.nbytes for each in saved.values()) == expected
    assert not weights & saved.keys()
    assert (inputs <= saved.keys()) == (small == 1)
    with movable_saves(device=CPU, stays=weights | inputs) as fewer:
        torch.autograd.graph.get_gradient_edge(encoder(given))
    assert not inputs & fewer.keys()
    assert len(fewer) == len(saved) - (small == 1)


def test_a_unit_that_was_not_sent_for_is_refused():
    encoder, queue = Encoder(recompute=False), PrefetchQueue(HostCopies())
    output, saved = encoded(encoder, 0)
    queue.leave({0: saved})
    queue.let_go(0)
    with pytest.raises(AssertionError, match="was not sent for"):
        output.sum().backward()
