"""What the encoder's backward needs, on the host meanwhile: the same gradients, memory let go."""

import pytest
import torch
from lazy_copies import LazyCopies
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from loongplug.hetero import activations
from loongplug.hetero.activations import SavedOnHost
from loongplug.platform.copies import Copies, CudaCopies, HostCopies

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


def gradients(copies: Copies | None, *, recompute: bool = False) -> Tensor:
    """Of all weights, all units encoded before the first goes backward."""
    encoder = Encoder(recompute=recompute)
    saved = None
    if copies is not None:
        saved = SavedOnHost(copies=copies, device=CPU, stays=encoder.parameters())
    outputs = {}
    for unit in range(len(ROWS)):
        if saved is None:
            outputs[unit] = encoder(pixels(unit))
        else:
            with saved.of_unit(unit):
                outputs[unit] = encoder(pixels(unit))
    if saved is not None:
        saved.left()
    for unit, output in outputs.items():
        if saved is not None:
            saved.bring(unit)
        output.backward(torch.full_like(output, unit + 1))
    return torch.cat([each.grad.flatten() for each in encoder.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("copies", [LazyCopies, HostCopies, CudaCopies])
def test_gradients_are_those_of_activations_that_stay(copies, recompute):
    expected = gradients(None, recompute=recompute)
    assert torch.equal(gradients(copies(), recompute=recompute), expected)


def waits() -> int:
    copies = LazyCopies()
    gradients(copies)
    return copies.waits


@pytest.mark.parametrize("forgotten", range(waits()))
def test_without_any_of_its_waits_gradients_are_wrong(forgotten):
    assert not torch.equal(gradients(LazyCopies(forgotten=forgotten)), gradients(None))


def test_two_units_are_on_the_device_at_most(monkeypatch):
    """Each storage once, however many views of it were saved; weights do not travel."""
    noted: dict[int, tuple[StorageWeakRef, int]] = {}
    counts: list[int] = []
    pack = SavedOnHost._pack

    def noting(self, tensor, unit):
        packed = pack(self, tensor, unit)
        if not isinstance(packed, Tensor):
            storage = tensor.untyped_storage()
            noted[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            counts.append(resident())
        return packed

    def resident() -> int:
        return sum(nbytes for storage, nbytes in noted.values() if not storage.expired())

    monkeypatch.setattr(SavedOnHost, "_pack", noting)
    monkeypatch.setattr(activations, "_SMALL", 1)
    encoder = Encoder(recompute=False)
    saved = SavedOnHost(copies=HostCopies(), device=CPU, stays=encoder.parameters())
    outputs, between = {}, []
    for unit in range(len(ROWS)):
        given = pixels(unit)
        with saved.of_unit(unit, stays=[given] if unit == 1 else []):
            outputs[unit] = torch.autograd.graph.get_gradient_edge(encoder(given))
        del given
        between.append(resident())
    # pixels, patches, qkv, softmax, the product behind it, tanh; [rows, 16] and three of them
    row = 16 * 4 * (1 + 1 + 3 + 1 + 1 + 1)
    assert between == [row * rows - (unit == 1) * 64 * rows for unit, rows in enumerate(ROWS)]
    assert max(counts) == row * (25 + 33)
    saved.left()
    assert resident() == 0
    weights = {each.untyped_storage()._cdata for each in encoder.parameters()}
    assert not weights & noted.keys()


def test_a_unit_that_was_not_sent_for_is_refused():
    encoder = Encoder(recompute=False)
    saved = SavedOnHost(copies=HostCopies(), device=CPU, stays=encoder.parameters())
    with saved.of_unit(0):
        output = encoder(pixels(0))
    saved.left()
    with pytest.raises(AssertionError, match="was not sent for"):
        output.sum().backward()
