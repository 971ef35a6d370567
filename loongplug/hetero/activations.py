"""What a unit's backward through the encoder needs, on the host between its forward and it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from loongplug.platform.copies import Copies
from loongplug.platform.saved_storages import SavedStorage, SavedView, saved_view

# Storages below this stay: their copies would take longer than they are worth.
_SMALL = 1024


@dataclass(kw_only=True)
class _Unit:
    stays: set[int]  # storages, by their addresses
    saved: dict[int, SavedStorage] = field(default_factory=dict)  # by the storage's address
    mark: Any = None


class SavedOnHost:
    """Activations of one step's units; at most two units' are on the device.

    A unit's leave while the next one is encoded, and come back while the one before it goes
    backward, both in the order of the encoding. Whole storages travel, each once, however many
    tensors of it were saved. What ``stays`` is not copied, as others hold it, nor what is small.

    Torch gives operations another object than the one that they have saved, so weights lack
    attributes there: Megatron's fused accumulation into gradient buffers does not work with it.
    """

    def __init__(self, *, copies: Copies, device: torch.device, stays: Iterable[Tensor]) -> None:
        """``stays``: what all units use, such as weights."""
        self._copies = copies
        self._device = device
        self._stays = _addresses(stays)
        self._units: dict[int, _Unit] = {}
        self._leaving: _Unit | None = None
        self._coming: list[int] = []

    @contextmanager
    def of_unit(self, unit: int, *, stays: Iterable[Tensor] = ()) -> Iterator[None]:
        """Inside, ``unit`` is encoded; ``stays``: its inputs."""
        made = self._units[unit] = _Unit(stays=self._stays | _addresses(stays))

        def pack(tensor: Tensor) -> SavedView | Tensor:
            return self._pack(tensor, made)

        with saved_tensors_hooks(pack, _unpack):
            yield
        self._let_go()
        self._copies.follow()
        for each in made.saved.values():
            assert each.device is not None
            each.host = self._copies.host_like(each.device)
            self._copies.copy(each.host, each.device)
        made.mark = self._copies.mark()
        self._leaving = made

    def left(self) -> None:
        """All units have been encoded: nothing of them stays on the device."""
        self._let_go()
        self._coming = list(self._units)

    def bring(self, unit: int) -> None:
        """Before the unit's backward, after which nothing holds what it needed."""
        if unit in self._coming:
            self._send_for_next()
        here = self._units.pop(unit)
        self._copies.wait(here.mark)
        self._send_for_next()

    def _pack(self, tensor: Tensor, unit: _Unit) -> SavedView | Tensor:
        storage = tensor.untyped_storage() if type(tensor) is Tensor else None
        if (
            storage is None
            or tensor.device != self._device
            or storage.nbytes() < _SMALL
            or storage._cdata in unit.stays
        ):
            return tensor.detach()  # the tensor itself would hold its own graph
        return saved_view(tensor, unit.saved)

    def _let_go(self) -> None:
        if self._leaving is None:
            return
        self._copies.wait(self._leaving.mark)
        for each in self._leaving.saved.values():
            each.device = None
        self._leaving = None

    def _send_for_next(self) -> None:
        if not self._coming:
            return
        unit = self._units[self._coming.pop(0)]
        self._copies.follow()  # the memory may be in use until then
        for each in unit.saved.values():
            assert each.host is not None
            each.device = torch.empty(each.host.shape, dtype=torch.uint8, device=self._device)
            self._copies.copy(each.device, each.host)
        unit.mark = self._copies.mark()


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors}


def _unpack(packed: SavedView | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()
