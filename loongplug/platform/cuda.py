"""CUDA with NCCL: upstream's code as it is, but for Adam's steps."""

import torch

from loongplug.platform.active import Platform
from loongplug.platform.copies import CudaCopies
from loongplug.platform.foreach import ON_CUDA
from loongplug.platform.replacements import ReplacementTable


class CudaPlatform(Platform):
    """One GPU per process; which one is Megatron's choice, by LOCAL_RANK."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.use(ReplacementTable("cuda", ON_CUDA))

    @property
    def device(self) -> torch.device:
        """The current GPU; asked again each time, because Megatron sets it while it starts."""
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int:
        """Most bytes that torch's allocator held in tensors."""
        return torch.cuda.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def copies(self) -> CudaCopies:
        """A stream of their own, on the GPU that is the current one at the first copy."""
        return CudaCopies()

    def release(self, storage: torch.UntypedStorage) -> None:
        """To torch's allocator, for the stream that the storage was allocated on."""
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """From torch's allocator, on the current stream."""
        storage.resize_(nbytes)
