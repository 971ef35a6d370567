"""What can be on the host meanwhile: a rank's encoder, and what a unit's backward needs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from loongplug.parallel.module_ddp import bucket_groups_of
from loongplug.platform.platforms import Platform
from loongplug.platform.prefetch import Movable, SavedView, saved_view

# Storages below this stay: their copies would take longer than they are worth.
_SMALL = 1024


@dataclass(kw_only=True, eq=False)
class _Storage(Movable):
    """A whole storage: all tensors on it stay the objects that they are, also while it is away.

    ``device`` is all of it, [nbytes] uint8, and always there; its memory is not.
    """

    platform: Platform
    was_away: bool = False  # so that ``host`` has what it was then

    def free(self) -> None:
        assert self.device is not None
        self.platform.release(self.device.untyped_storage())
        self.was_away = True

    def allocate(self) -> Tensor:
        assert self.device is not None
        self.platform.restore(self.device.untyped_storage(), self.device.nbytes)
        return self.device


class EncoderState:
    """The encoder's parameters, gradients and optimizer state, as whole storages.

    So parameters, Megatron's flat buffers, its optimizers' shards and all views of them stay the
    objects that they are. Gradients are zero whenever this state leaves, and so are not copied;
    nor are frozen weights, which nothing writes to in a run: the host has kept a copy.
    """

    def __init__(
        self, part: DistributedDataParallel, optimizers: Sequence[Any], *, platform: Platform
    ) -> None:
        """``part``: Megatron's data parallel wrapper around what trains in the encoder's state."""
        self._part = part
        self._optimizers = optimizers
        self._platform = platform
        self._copies = platform.copies()
        # Of the step before, by address, which cannot become another storage's while it is here.
        self._before: dict[int, _Storage] = {}

    def movable(self) -> list[Movable]:
        """All that there is now, each storage once; to be asked for again in each step."""
        assert all(group.param_gather_handle is None for group in bucket_groups_of(self._part))
        parameters = self._on_device(self._part.module.parameters())
        trained = self._trained()
        trains = addresses((*(each for each in parameters if each.requires_grad), *trained))
        found: dict[int, _Storage] = {}
        for address, tensor in _by_address((*parameters, *trained)).items():
            storage = self._before.get(address)
            if storage is None:
                storage = self._storage(tensor)
                assert storage.device is not None
                storage.host = self._copies.host_like(storage.device)
            storage.unchanged = storage.was_away and address not in trains
            found[address] = storage
        self._before = found
        gradients = _by_address(self._gradients()).items()
        zeros = [self._storage(each, zeros=True) for at, each in gradients if at not in found]
        return [*found.values(), *zeros]

    def _storage(self, tensor: Tensor, *, zeros: bool = False) -> _Storage:
        device = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        device.set_(tensor.untyped_storage())
        return _Storage(device=device, where=tensor.device, platform=self._platform, zeros=zeros)

    def _trained(self) -> list[Tensor]:
        """What holds parameters that train, beside themselves, and what optimizers have of them."""
        found = [each.param_data for each in self._buffers()]
        for optimizer in self._optimizers:
            inner = getattr(optimizer, "optimizer", None)
            if inner is not None:  # else of a rank without parameters
                found += chain(*(group["params"] for group in inner.param_groups))
                found += chain(*(state.values() for state in inner.state.values()))
        return self._on_device(found)

    def _gradients(self) -> list[Tensor]:
        found = ((each.grad_data, *each.extra_main_grads) for each in self._buffers())
        return self._on_device(chain(*found))

    def _on_device(self, values: Iterable[Any]) -> list[Tensor]:
        device = self._platform.device
        return [x for x in values if torch.is_tensor(x) and x.device == device and x.numel()]

    def _buffers(self) -> list[Any]:
        return [*self._part.buffers, *self._part.expert_parallel_buffers]


def _by_address(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    return {each.untyped_storage()._cdata: each for each in tensors}


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {*_by_address(tensors)}


@contextmanager
def movable_saves(*, device: torch.device, stays: set[int]) -> Iterator[dict[int, Movable]]:
    """Inside, what a unit's graph saves on ``device`` is entered in what is given, by its address.

    Not entered are storages whose addresses are in ``stays``, as others hold them (weights,
    inputs), nor what is small. A backward finds there what is on the device by then. Torch gives
    it other objects than were saved, so weights lack attributes there: Megatron's fused
    accumulation into gradient buffers does not work with it.
    """
    saved: dict[int, Movable] = {}

    def pack(tensor: Tensor) -> SavedView | Tensor:
        storage = tensor.untyped_storage() if type(tensor) is Tensor else None
        if (
            storage is None
            or tensor.device != device
            or storage.nbytes() < _SMALL
            or storage._cdata in stays
        ):
            return tensor.detach()  # the tensor itself would hold its own graph
        return saved_view(tensor, saved)

    with saved_tensors_hooks(pack, _unpack):
        yield saved


def _unpack(packed: SavedView | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()
