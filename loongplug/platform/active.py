"""The one platform of this process, asked for everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from loongplug.platform.prefetch import Copies
    from loongplug.platform.replacements import ReplacementTable

DeviceName = Literal["cpu", "cuda"]


class Platform(ABC):
    """What differs between a CPU run and a CUDA run; holds the tables applied for it."""

    name: DeviceName
    backend: str  # of torch.distributed: "gloo" or "nccl"

    def __init__(self) -> None:
        self._tables: dict[str, ReplacementTable] = {}

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this process's tensors live."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The most memory held since the start or since ``reset_peak_memory``."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak from the memory held now."""

    def copies(self) -> Copies:
        """A new queue of copies between device and host."""
        from loongplug.platform.prefetch import Copies

        return Copies()

    @abstractmethod
    def release(self, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory on the device to others; tensors on it stay valid objects."""

    @abstractmethod
    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory for a released storage again, of any content."""

    def use(self, table: ReplacementTable) -> None:
        """Apply a table that ends with this platform, unless one of its name is applied already."""
        if table.name not in self._tables:
            table.apply()
            self._tables[table.name] = table

    def deactivate(self) -> None:
        """Undo every table, the last first, and leave the process without a platform."""
        while self._tables:
            _, table = self._tables.popitem()
            table.undo()
        if Process.platform is self:
            Process.platform = None


class Process:
    """Holds the process's platform; the only state of this module."""

    platform: Platform | None = None


def current_platform() -> Platform:
    """The active platform. Raises RuntimeError when ``activate`` has not been called."""
    if Process.platform is None:
        raise RuntimeError("no platform is active; call loongplug.platform.activate() first")
    return Process.platform


def is_host() -> bool:
    """Whether work is done on the host: the active platform's device, or none is active yet."""
    return Process.platform is None or Process.platform.name == "cpu"
