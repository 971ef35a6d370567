"""Features on the host: the same numbers, two units on the device, and every wait is needed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from lazy_copies import LazyCopies
from on_a_gpu import in_fresh_interpreter
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loongplug.hetero.store import FeatureStore, KeptOnDevice, KeptOnHost, from_store
from loongplug.models.features import place, visual_tokens
from loongplug.platform import current_platform
from loongplug.platform.copies import CudaCopies, HostCopies

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
WIDTH, LENGTH, AHEAD = 6, 12, 2


def made(tokens: list[int]) -> dict[int, Tensor]:
    """Every unit's features, [tokens, WIDTH]."""
    chance = torch.Generator().manual_seed(1)
    return {unit: torch.randn(rows, WIDTH, generator=chance) for unit, rows in enumerate(tokens)}


def schedule(
    store: FeatureStore, tokens: list[int], *, seen: Callable[[], None] = lambda: None
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """What a decoder makes of all units, and their gradients: AHEAD forwards before a backward."""
    weight = torch.arange(1.0, LENGTH + 1).reshape(LENGTH, 1, 1)
    losses: list[Tensor] = []
    graphs: list[Tensor] = []

    def forward(unit: int) -> None:
        features = from_store(store, unit, trains=True)
        visual = visual_tokens([np.arange(tokens[unit])], length=LENGTH, device=CPU)
        placed = place(torch.zeros(LENGTH, 1, WIDTH), features, visual=visual)
        del features
        graphs.append((placed * weight * (unit + 1)).tanh().sum())
        losses.append(graphs[-1].detach())

    for unit in range(len(tokens)):
        forward(unit)
        seen()
        if unit >= AHEAD:
            graphs.pop(0).backward()
            seen()
    while graphs:
        graphs.pop(0).backward()
    return losses, store.gradients()


def same(one: tuple[list[Tensor], dict[int, Tensor]], other: object) -> bool:
    losses, gradients = one
    other_losses, other_gradients = other
    return torch.equal(torch.stack(losses), torch.stack(other_losses)) and all(
        torch.equal(gradients[unit], other_gradients[unit]) for unit in gradients
    )


@pytest.mark.parametrize("tokens", [[3, 5, 2, 4, 7], [4], [0, 3, 0, 0], [1, 2]])
@pytest.mark.parametrize("copies", [LazyCopies, HostCopies, CudaCopies])
def test_numbers_are_those_of_features_that_stay(tokens, copies):
    expected = schedule(KeptOnDevice(made(tokens)), tokens)
    features = made(tokens)
    found = schedule(KeptOnHost(features, copies=copies(), device=CPU), tokens)
    assert not features
    assert sorted(found[1]) == list(range(len(tokens)))
    assert same(found, expected)
    assert all(gradient.any() for unit, gradient in found[1].items() if tokens[unit])


TOKENS = [3, 5, 2, 4]


def waits() -> int:
    copies = LazyCopies()
    schedule(KeptOnHost(made(TOKENS), copies=copies, device=CPU), TOKENS)
    return copies.waits


@pytest.mark.parametrize("forgotten", range(waits()))
def test_without_any_of_its_waits_numbers_are_wrong(forgotten):
    expected = schedule(KeptOnDevice(made(TOKENS)), TOKENS)
    copies = LazyCopies(forgotten=forgotten)
    assert not same(schedule(KeptOnHost(made(TOKENS), copies=copies, device=CPU), TOKENS), expected)


def test_two_units_are_on_the_device_at_most(monkeypatch):
    tokens, row = [3, 5, 2, 4, 7], WIDTH * 4
    noted: list[tuple[StorageWeakRef, int]] = []
    counts: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        noted.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def count() -> None:
        counts.append(sum(nbytes for storage, nbytes in noted if not storage.expired()))

    def beside(self: KeptOnHost, host: Tensor) -> Tensor:
        try:
            return note(original(self, host))
        finally:
            count()

    original = KeptOnHost._beside
    monkeypatch.setattr(KeptOnHost, "_beside", beside)
    features = {unit: note(each) for unit, each in made(tokens).items()}
    count()
    store = KeptOnHost(features, copies=HostCopies(), device=CPU)
    count()
    assert (counts[0], counts[-1]) == (21 * row, 3 * row)
    counts.clear()
    monkeypatch.setattr(store, "gradients", dict)
    schedule(store, tokens, seen=count)
    assert max(counts) == (4 + 7) * row
    assert counts[-1] == 0


def test_what_stays_is_let_go_unit_by_unit():
    """Also what has come in one piece, and shares of a payload; whole payloads are not copied."""
    arrived, payload = torch.randn(9, WIDTH), torch.randn(8, WIDTH)
    features = {**dict(enumerate(arrived.split([4, 0, 5]))), 3: torch.randn(8, WIDTH)[2:4]}
    features[4] = payload.detach()
    store, whole = KeptOnDevice(features), StorageWeakRef(arrived.untyped_storage())
    assert not features
    expected = arrived[4:].clone()
    del arrived
    assert whole.expired()
    found = [store.bring(unit) for unit in range(5)]
    assert [each.untyped_storage().nbytes() for each in found] == [each.nbytes for each in found]
    assert torch.equal(found[2], expected)
    assert found[4].data_ptr() == payload.data_ptr()


@pytest.mark.parametrize(
    "kept", [KeptOnDevice, lambda features: KeptOnHost(features, copies=HostCopies(), device=CPU)]
)
def test_a_gradient_that_did_not_come_is_missed(kept):
    store = kept(made([1, 2]))
    store.keep_gradient(1, torch.zeros(2, WIDTH))
    with pytest.raises(AssertionError, match=r"no gradient came for units \[0\]"):
        store.gradients()


def test_a_unit_out_of_turn_is_refused():
    store = KeptOnHost(made([1, 2]), copies=HostCopies(), device=CPU)
    with pytest.raises(AssertionError, match="unit 1 is asked for before unit 0"):
        store.bring(1)


def test_without_training_there_is_no_graph():
    store = KeptOnHost(made([2]), copies=LazyCopies(), device=CPU)
    features = from_store(store, 0, trains=False)
    assert not features.requires_grad
    assert torch.equal(features, made([2])[0])


@pytest.mark.gpu
def test_on_a_gpu():
    in_fresh_interpreter(__file__, "travels_on_a_gpu")


def travels_on_a_gpu():
    device = current_platform().device
    tokens = [300, 500, 200, 400]
    features = {unit: torch.randn(rows, 4096, device=device) for unit, rows in enumerate(tokens)}
    expected = {unit: each.cpu() for unit, each in features.items()}
    store = KeptOnHost(features, copies=CudaCopies(), device=device)
    for unit in expected:
        rows = from_store(store, unit, trains=True)
        (rows * (unit + 2)).square().sum().backward()
        assert torch.equal(rows.detach().cpu(), expected[unit])
        del rows
    for unit, gradient in store.gradients().items():
        assert torch.allclose(gradient.cpu(), 2 * expected[unit] * (unit + 2) ** 2)
