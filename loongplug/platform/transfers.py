"""Tensors from the host to the device, without the host waiting for it."""

import torch
from torch import Tensor

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
