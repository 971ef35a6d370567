"""What autograd keeps of storages that may be elsewhere until a backward needs them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loongplug.platform.prefetch import Movable


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """Stands in the graph for a saved tensor; ``storage`` is as bytes, [nbytes] uint8."""

    storage: Movable
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, of its storage's bytes on the device."""
        assert self.storage.device is not None, "its storage was not sent for"
        found = torch.empty(0, dtype=self.dtype, device=self.storage.where)
        return found.set_(
            self.storage.device.untyped_storage(), self.offset, self.size, self.stride
        )


def saved_view(
    tensor: Tensor, known: dict[int, Movable], *, made: Callable[..., Movable] = Movable
) -> SavedView:
    """For ``tensor``; its storage is entered in ``known``, by its address, if it is a new one.

    It is ``made`` of its bytes (``device``) and of where these are.
    """
    storage = tensor.untyped_storage()
    if storage._cdata not in known:
        nbytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        known[storage._cdata] = made(device=nbytes, where=tensor.device)
    return SavedView(
        storage=known[storage._cdata],
        dtype=tensor.dtype,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )
