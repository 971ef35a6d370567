"""Where the features of a step's units are while the decoder works (phase 2)."""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from loongplug.platform.copies import Copies


class FeatureStore(Protocol):
    """Units' features on a rank that consumes them, and what comes back for them.

    Features are [tokens, width]; gradients are as their features. A unit is asked for once, in
    the order of the numbers, and is the caller's from then on: its memory is free when the
    caller has let go of it.
    """

    def bring(self, unit: int) -> Tensor:
        """A unit's features on the device, without a graph."""

    def keep_gradient(self, unit: int, gradient: Tensor) -> None:
        """Called once for each unit, in any order."""

    def gradients(self) -> dict[int, Tensor]:
        """Of all units, on the device; called once, at the end."""


class KeptOnDevice:
    """Features stay on the device until they are used."""

    def __init__(self, features: dict[int, Tensor]) -> None:
        """Takes ``features`` over: the dictionary is empty afterwards."""
        self._features = {unit: _own_storage(features.pop(unit)) for unit in sorted(features)}
        self._waits_for = set(self._features)  # units whose gradients have not come
        self._gradients: dict[int, Tensor] = {}

    def bring(self, unit: int) -> Tensor:
        """In memory of its own."""
        return self._features.pop(unit)

    def keep_gradient(self, unit: int, gradient: Tensor) -> None:
        """Keep it as it is."""
        self._waits_for.remove(unit)
        self._gradients[unit] = gradient

    def gradients(self) -> dict[int, Tensor]:
        """Let them go, too."""
        assert not self._waits_for, f"no gradient came for units {sorted(self._waits_for)}"
        gradients, self._gradients = self._gradients, {}
        return gradients


def _own_storage(features: Tensor) -> Tensor:
    """Clone views: a view keeps the whole receive buffer alive."""
    if features.untyped_storage().nbytes() == features.nbytes:
        return features
    return features.clone()


class KeptOnHost:
    """Features are on the host but for the unit in use and the next one; gradients leave at once.

    Memory on the device is allocated and freed in the order of the computation. The copies run
    beside it, so that each end of one is held until the computation has waited for the copy: a
    unit that is brought back until it is used, one that leaves until the next one of its kind
    leaves. There are two units' features at most, the one in use counted, and one gradient beside
    the one that is being made. A unit's gradient takes its features' place on the host.
    """

    def __init__(
        self, features: dict[int, Tensor], *, copies: Copies, device: torch.device
    ) -> None:
        """Takes ``features`` over: the dictionary is empty afterwards."""
        self._copies = copies
        self._device = device
        self._due = sorted(features)
        self._host = {unit: copies.host_like(each) for unit, each in features.items()}
        copies.follow()
        for unit, each in features.items():
            copies.copy(self._host[unit], each)
        copies.wait(copies.mark())
        features.clear()
        self._coming: tuple[int, Tensor, Any] | None = None
        self._leaving: tuple[Tensor, Any] | None = None
        self._waits_for = set(self._host)  # units whose gradients have not come
        self._send_for_next()

    def bring(self, unit: int) -> Tensor:
        """What was sent for before; the next one sets out."""
        assert self._coming is not None
        number, features, mark = self._coming
        assert number == unit, f"unit {unit} is asked for before unit {number}"
        self._copies.wait(mark)
        self._send_for_next()
        return features

    def keep_gradient(self, unit: int, gradient: Tensor) -> None:
        """It leaves; the one before it has left."""
        if self._leaving is not None:
            self._copies.wait(self._leaving[1])
        self._waits_for.remove(unit)
        self._copies.follow()
        self._copies.copy(self._host[unit], gradient)
        self._leaving = gradient, self._copies.mark()

    def gradients(self) -> dict[int, Tensor]:
        """All come back."""
        assert not self._waits_for, f"no gradient came for units {sorted(self._waits_for)}"
        back = {unit: self._beside(host) for unit, host in self._host.items()}
        self._copies.follow()
        for unit, gradient in back.items():
            self._copies.copy(gradient, self._host[unit])
        self._copies.wait(self._copies.mark())
        self._leaving = None
        self._host.clear()
        return back

    def _send_for_next(self) -> None:
        self._coming = None
        if not self._due:
            return
        unit = self._due.pop(0)
        features = self._beside(self._host[unit])
        self._copies.follow()  # its memory may be in use until then
        self._copies.copy(features, self._host[unit])
        self._coming = unit, features, self._copies.mark()

    def _beside(self, host: Tensor) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=self._device)


def from_store(store: FeatureStore, unit: int, *, trains: bool) -> Tensor:
    """A unit's features for the decoder's graph, which hands their gradient to the store.

    Nothing but the graph's own operations holds them: a leaf would keep them until its backward.
    """
    if not trains:
        return store.bring(unit)
    features: Tensor = _FromStore.apply(torch.empty(0, requires_grad=True), store, unit)
    return features


class _FromStore(torch.autograd.Function):
    """Has an input without values, since the graph goes no further than inputs that need it."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, store: FeatureStore, unit: int) -> Tensor:
        ctx.keep = partial(store.keep_gradient, unit)
        return store.bring(unit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.keep(gradient)
        return None, None, None
