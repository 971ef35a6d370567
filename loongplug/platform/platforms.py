"""The two platforms: host memory with gloo, and CUDA with NCCL."""

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._device

from loongplug.platform.active import DeviceName, Process
from loongplug.platform.cuda_on_cpu import CPU_ROWS
from loongplug.platform.devices import HOST
from loongplug.platform.multi_tensor import ON_CUDA
from loongplug.platform.prefetch import Copies
from loongplug.platform.replacements import Replacement, ReplacementTable

# How many of oneDNN's kernels it keeps, and torch once more. One of a product has some 280 KiB in
# each, and each would keep 1,024: half a gigabyte where rows vary. A microbatch needs some 40.
# Both ask at their first kernel.
_KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "32"}
# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Platform:
    """What differs between a CUDA run and a CPU run: CUDA's, with one GPU per process.

    Megatron chooses the GPU by LOCAL_RANK. Holds the tables that are applied for the platform; on
    CUDA, upstream's code but for Adam stays.
    """

    name: DeviceName = "cuda"
    backend = "nccl"  # of torch.distributed

    def __init__(self, rows: Sequence[Replacement] = ON_CUDA) -> None:
        self._tables: dict[str, ReplacementTable] = {}
        self.use(ReplacementTable(self.name, rows))

    @property
    def device(self) -> torch.device:
        """The current GPU; asked again each time, because Megatron sets it while it starts."""
        return torch.device("cuda", torch.cuda.current_device())

    def peak_memory_bytes(self) -> int:
        """Most bytes that torch's allocator held in tensors, since the start or a reset."""
        return torch.cuda.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        """Start a new peak from the memory held now."""
        torch.cuda.reset_peak_memory_stats()

    def copies(self) -> Copies:
        """A new queue of copies between device and host."""
        return Copies()

    def release(self, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory on the device to others; tensors on it stay valid objects.

        To torch's allocator, for the stream that the storage was allocated on.
        """
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory for a released storage again, of any content, on the current stream."""
        storage.resize_(nbytes)

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


class CpuPlatform(Platform):
    """Host memory and gloo; active from its construction until ``deactivate``."""

    name = "cpu"
    backend = "gloo"
    device = HOST

    def __init__(self) -> None:
        # ``with torch.device(...)`` knows the factories by a set made at its first use: it has
        # to be made of torch's own functions, which the wrappers call.
        torch.utils._device._device_constructors()
        _keep_freed_memory()
        for name, number in _KEPT_KERNELS.items():
            os.environ.setdefault(name, number)
        self._dynamo_before = _set_dynamo_disabled("1")
        super().__init__(CPU_ROWS)

    def peak_memory_bytes(self) -> int:
        """The most resident memory of this process."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            import resource

            # Linux counts KiB, macOS bytes; only the latter comes here.
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024

    def reset_peak_memory(self) -> None:
        """Start a new peak where the kernel lets a process do so (Linux); else keep the old."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def release(self, storage: torch.UntypedStorage) -> None:
        """Keep the memory, the only one: what uses it gets NaN, where a GPU would fail."""
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Leave the memory, which is still there."""
        assert storage.nbytes() == nbytes

    def deactivate(self) -> None:
        """Undo the CPU layer."""
        super().deactivate()
        _set_dynamo_disabled(self._dynamo_before)


def _keep_freed_memory() -> None:
    """Have the C library keep what tensors of a step free for those of the next one.

    As it starts, glibc takes tensors above some 100 KiB to 32 MiB from the kernel and gives them
    back, by a threshold that wanders, and the kernel clears each page anew: up to a tenth of a
    small model's step. Larger ones still go back. Other C libraries are left as they are, and it
    stays so for the process, since nobody can ask what was set before.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _set_dynamo_disabled(disabled: str | None) -> str | None:
    """Set the variable by which what upstream hands to torch.compile runs eagerly; as it was.

    Upstream compiles its small fused functions when they are first called. On the CPU that
    needs a C++ compiler and takes longer than it saves, and dynamo refuses to start when
    torch's functions are not the ones it knows.
    """
    before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    if disabled is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = disabled
    # The variable is read when dynamo is imported: tell one that already was.
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = disabled == "1"
    return before
