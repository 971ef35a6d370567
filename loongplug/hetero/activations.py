"""What a unit's backward through the encoder needs, so that it can be on the host until then."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from loongplug.platform.prefetch import Movable, SavedView, saved_view

# Storages below this stay: their copies would take longer than they are worth.
_SMALL = 1024


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Of their storages."""
    return {each.untyped_storage()._cdata for each in tensors}


@contextmanager
def movable_saves(*, device: torch.device, stays: set[int]) -> Iterator[dict[int, Movable]]:
    """Inside, a unit is encoded; what its graph saves on ``device`` is entered in what is given.

    That is by the storage's address, each once, however many tensors of it were saved. Storages
    whose addresses are in ``stays`` are not entered, as others hold them (weights, inputs), nor
    what is small. A backward finds there what is on the device by then.

    Torch gives operations another object than the one that they have saved, so weights lack
    attributes there: Megatron's fused accumulation into gradient buffers does not work with it.
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
