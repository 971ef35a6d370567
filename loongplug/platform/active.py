"""The one platform of this process: chosen once, asked for everywhere."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from loongplug.platform.copies import Copies
    from loongplug.platform.replacements import ReplacementTable

PLATFORM_NAMES = ("auto", "cpu", "cuda")

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
    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The most memory held since the start or since ``reset_peak_memory``."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak from the memory held now."""

    @abstractmethod
    def copies(self) -> Copies:
        """A new queue of copies between device and host."""

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
        if _Process.platform is self:
            _Process.platform = None


class _Process:
    """The process's platform; the only state of this module."""

    platform: Platform | None = None


def activate(name: str = "auto") -> Platform:
    """Choose the process's platform, before the first ``import megatron``.

    ``"auto"`` takes CUDA where ``torch.cuda.is_available()``, and the CPU elsewhere; it keeps
    a platform that is already active. This applies the table of replacements of
    ``loongplug.platform.cpu`` or ``loongplug.platform.cuda``.

    Raises ValueError for an unknown name, for ``"cuda"`` without a usable GPU, and when
    another platform is active already.
    """
    _require_known(name)
    active = _Process.platform
    if active is not None:
        if name in ("auto", active.name):
            return active
        raise ValueError(
            f"this process runs on {active.name!r} already and cannot change to {name!r}; "
            "call current_platform().deactivate() first"
        )
    # Upstream imports torch's compiler of extensions, which warns where there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _Process.platform = _make(name)
    return _Process.platform


def choose_device(name: str = "auto") -> DeviceName:
    """The device that ``name`` stands for, without activating a platform.

    ``"auto"`` takes CUDA where ``torch.cuda.is_available()``, and the CPU elsewhere.

    Raises ValueError for an unknown name, and for ``"cuda"`` without a usable GPU.
    """
    _require_known(name)
    # Here and not above, so that importing loongplug.platform stays free of torch.
    import torch

    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        raise ValueError(
            "device 'cuda' was asked for, but torch sees no usable CUDA GPU here "
            "(torch.cuda.is_available() is False); use --device cpu, or --device auto"
        )
    return "cuda" if name == "cuda" or (name == "auto" and usable) else "cpu"


def current_platform() -> Platform:
    """The active platform. Raises RuntimeError when ``activate`` has not been called."""
    if _Process.platform is None:
        raise RuntimeError("no platform is active; call loongplug.platform.activate() first")
    return _Process.platform


def is_host() -> bool:
    """Whether work is done on the host: the active platform's device, or none is active yet."""
    return _Process.platform is None or _Process.platform.name == "cpu"


def _require_known(name: str) -> None:
    if name not in PLATFORM_NAMES:
        raise ValueError(f"device {name!r} is unknown; expected one of {', '.join(PLATFORM_NAMES)}")


def _make(name: str) -> Platform:
    if choose_device(name) == "cuda":
        from loongplug.platform.cuda import CudaPlatform

        return CudaPlatform()
    from loongplug.platform.cpu import CpuPlatform

    return CpuPlatform()
