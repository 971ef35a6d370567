"""The host's memory of a rank that is not there."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.estimate.tape import Tape


class Away:
    """What leaves the device is none of the ``device`` tape's, and counts as the host's."""

    def __init__(self, device: Tape) -> None:
        self._device = device
        self._host = Tape(region="host")

    @property
    def most(self) -> int:
        """Bytes on the host at one time."""
        return self._host.most

    def copies(self) -> "MetaCopies":
        """Such that move no bytes."""
        return MetaCopies(self._host)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Its memory is given back, though tensors on it live on."""
        self._device.given_back(storage)


class MetaCopies:
    """Copies between tensors without memory; see :class:`loongplug.platform.copies.Copies`."""

    def __init__(self, host: Tape) -> None:
        self._host = host

    def host_like(self, tensor: Tensor) -> Tensor:
        """Counted by the host's tape alone."""
        with _disable_current_modes():
            found = torch.empty_like(tensor)
        self._host.see(found)
        return found

    def follow(self) -> None:
        """Nothing is computed."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """There are no values."""

    def keep(self, tensor: Tensor) -> None:
        """Nothing is under way."""

    def mark(self) -> Any:
        """Nothing is under way."""

    def wait(self, mark: Any) -> None:
        """Nothing is under way."""
