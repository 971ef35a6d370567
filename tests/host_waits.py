"""What would make a GPU's host wait, found on a machine without one.

A tensor of the meta device has no values, so that whatever asks for one fails there; what a GPU
would do with a wait, but meta without, is refused here. Runs on the meta device run all of the
model's own code.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loongplug.estimate.live_bytes import Tape
from loongplug.estimate.tracing import devices_and_buffers
from loongplug.platform.devices import to_device
from loongplug.platform.platforms import CpuPlatform
from loongplug.platform.prefetch import Copies

META = torch.device("meta")
_aten = torch.ops.aten
# The host waits for these to say a value, or how many there are.
_ASKS = (
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "histc"),
)

_FROM_LISTS = ("tensor", "as_tensor", "new_tensor")


class HostWaitsError(Exception):
    """On a GPU the host would wait here."""


class NoWaits(TorchDispatchMode):
    """Raises where the host would wait for a device, for which meta stands.

    ``answers`` are for waits that are known and named: what stands in for an operation.
    """

    def __init__(self, answers: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self._answers = answers or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._answers:
            return self._answers[func](*args, **kwargs)
        if why := _why(func, args, kwargs):
            raise HostWaitsError(f"{func}: {why}")
        return func(*args, **kwargs)


class _NoListsToDevice(TorchFunctionMode):
    """torch.tensor copies from memory that is not pinned, where no dispatch mode sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _FROM_LISTS and result.is_meta:
            raise HostWaitsError(f"{func.__name__} on the device: a copy of memory not pinned")
        return result


@contextmanager
def no_waits(answers: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Inside, HostWaitsError is raised where the host would wait for the device."""
    with _NoListsToDevice(), NoWaits(answers):
        yield


@contextmanager
def meta_device() -> Iterator[None]:
    """Inside, the rank's device is meta; Megatron's parallel state has to be there.

    Copies of the platform's queue, for which the host never waits, move nothing.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(CpuPlatform, "device", META))
        stack.enter_context(patch.object(Copies, "host_like", _host_like))
        stack.enter_context(patch.object(Copies, "copy", lambda *_: None))
        stack.enter_context(devices_and_buffers(Tape(region=""), region=""))
        yield


def _host_like(copies: Copies, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _why(func: Any, args: Any, kwargs: Any) -> str | None:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if not any(each.is_meta for each in tensors) and not _goes_to_device(kwargs):
        return None  # the host's own
    name = func.overloadpacket.__name__
    if name in _ASKS:
        return "it asks the device for a value"
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return "it asks the device for the sum of its repeats"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return _why_index(args)
    copied = name in ("_to_copy", "copy", "copy_")
    if copied and any(each.device.type == "cpu" for each in tensors) and not _of_the_helper():
        return "a copy of memory that is not pinned: see loongplug.platform.devices"
    return None


def _why_index(args: Any) -> str | None:
    indices = [each for each in args[1] if each is not None]
    if not all(each.is_meta for each in indices):
        return "its indices are on the host"
    fills = len(args) > 2 and args[2].numel() == 1 and args[2].dim() == 0  # by a mask, as on a GPU
    if any(each.dtype in (torch.bool, torch.uint8) for each in indices) and not fills:
        return "it asks the device how many of a mask are set"
    return None


def _goes_to_device(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _of_the_helper() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is to_device.__code__:
            return True
        frame = frame.f_back
    return False
