"""The platform of the stand-in device: as CUDA's, and entered in a forked rank only."""

import os

import torch
import torch.distributed as dist

from loongplug.platform import active, current_platform
from loongplug.platform.platforms import CpuPlatform, Platform
from loongplug.platform.upstream import apply_upstream_replacements
from stand_in.cuda_names import cuda_table
from stand_in.extension import load


class StandInPlatform(Platform):
    """CUDA's, but for the device itself; NCCL is gloo on copies that refuses the host's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.extension = load()
        _serve_nccl()
        self.use(cuda_table(self.extension))

    @property
    def device(self) -> torch.device:
        """The current one."""
        return torch.device("stand_in", self.extension.current_device())


def enter() -> StandInPlatform:
    """Make the stand-in this rank's platform, in place of the CPU that its parent has."""
    before = current_platform()
    assert isinstance(before, CpuPlatform)
    before.deactivate()
    # As on the CPU: what upstream hands to torch.compile runs as it stands.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    platform = StandInPlatform()
    active.Process.platform = platform
    apply_upstream_replacements(platform)
    return platform


def _serve_nccl() -> None:
    """``--distributed-backend nccl`` is the stand-in's, for its own tensors alone."""

    def make(store: dist.Store, rank: int, size: int, timeout: object) -> object:
        return load().collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend._plugins["NCCL"] = dist.Backend._BackendPlugin(make, False)
    dist.Backend.backend_capability["nccl"] = ["stand_in"]
    dist.Backend.default_device_backend_map["stand_in"] = "nccl"
