"""Where tensors lie: how they come to the device, and what ``device="cuda"`` means on a CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loongplug.platform.active import is_host

HOST = torch.device("cpu")

_NO_COPY_ENGINE = ("cpu", "meta")  # nothing to wait for, and no memory that could be pinned


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor``, of any shape and dtype, on ``device``. No collectives.

    From page-locked memory, as the host waits for a copy of anything else, ``non_blocking`` or
    not. Torch keeps such memory for the next copy, and gives it to none before this one is done.
    """
    device = torch.device(device)
    if tensor.device.type == "cpu" and device.type not in _NO_COPY_ENGINE:
        tensor = tensor.pin_memory()  # itself, where it is pinned already
    return tensor.to(device, non_blocking=True)


def is_computed_on_host(tensor: Tensor) -> bool:
    """Whether the CPU's kernels serve ``tensor``; one without values goes where the run's would."""
    return is_host() if tensor.is_meta else tensor.device.type != "cuda"


def on_host(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A tensor factory for which ``device="cuda"`` is the host, and host memory is never pinned."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _says_cuda(device):
                kwargs["device"] = HOST
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _says_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int)
