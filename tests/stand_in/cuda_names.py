"""``torch.cuda`` for the stand-in: upstream's and our own code for GPUs run as they are.

What a GPU has and the stand-in has not is left as torch has it, and fails.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.utils._device

from loongplug.platform.gloo import exchanged_all_gather, exchanged_reduce_scatter
from loongplug.platform.replacements import Replacement, ReplacementTable

FACTORIES = (
    *("tensor", "as_tensor", "empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like"),
    *("full", "full_like", "rand", "randn", "randint", "arange", "eye"),
)


class Generator:
    """The device's: the host's, so that a run draws what it draws on the CPU.

    Its state is taken and put back with the host's.
    """

    def graphsafe_get_state(self) -> None:
        """Nothing of its own."""

    def clone_state(self) -> None:
        """Nothing of its own."""

    def graphsafe_set_state(self, state: None) -> None:
        """Nothing of its own."""

    def get_state(self) -> torch.Tensor:
        """The host's, [5056] uint8."""
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """The host's."""
        torch.default_generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        """The host's."""
        torch.default_generator.manual_seed(int(seed))


class _Generators:
    def __getitem__(self, device: object) -> Generator:
        return Generator()


def cuda_table(extension: ModuleType) -> ReplacementTable:
    """The names, for the device that ``extension`` is."""
    kind = extension.__name__

    def current() -> torch.device:
        return torch.device(kind, extension.current_device())

    def device_of(device: Any) -> Any:
        """``device`` itself, or the stand-in where it names CUDA."""
        if isinstance(device, bool) or device is None:
            return device
        if isinstance(device, int):
            return torch.device(kind, device)
        named = torch.device(device)
        if named.type != "cuda":
            return device
        return current() if named.index is None else torch.device(kind, named.index)

    class Stream(torch.Stream):
        """As ``torch.cuda.Stream``."""

        def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Any:
            return super().__new__(cls, device=device_of(device) or current(), **more)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, 0)

    class Event(torch.Event):
        """As ``torch.cuda.Event``."""

        def __new__(cls, enable_timing: bool = False, **more: Any) -> Any:
            return super().__new__(cls, device=current(), enable_timing=True)

        def record(self, stream: Any = None) -> None:
            super().record(stream or torch.accelerator.current_stream(current()))

        def wait(self, stream: Any = None) -> None:
            super().wait(stream or torch.accelerator.current_stream(current()))

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        if stream.device != current():
            raise RuntimeError(
                f"a stream of {stream.device} where {current()} is the current device"
            )
        before = torch.accelerator.current_stream(current())
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = device_of(kwargs["device"])
            return original(*args, **kwargs)

        return make

    def tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str | int | torch.device):
                args = (device_of(args[0]), *args[1:])
            return factory(original)(self, *args, **kwargs)

        return to

    def tensor_cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, **more: Any
    ) -> torch.Tensor:
        target = current() if device is None else device_of(device)
        return self.to(target, non_blocking=non_blocking, **more)

    def apply_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
        """Between host and GPU a parameter stays the same object; torch knows no such for others.

        So ``torch.nn.Module._apply`` would leave parameters without Megatron's attributes.
        """

        @functools.wraps(original)
        def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
            for parameter in self._parameters.values():
                if parameter is None:
                    continue
                with torch.no_grad():
                    moved = fn(parameter)
                if moved.device.type != parameter.device.type:
                    set_data(parameter, moved)
            return original(self, fn, recurse)

        return apply

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if value.device.type == self.device.type:
            data.__set__(self, value)
            return
        attributes, hooks = dict(vars(self)), self._backward_hooks
        torch.utils.swap_tensors(self, type(self)(value, requires_grad=self.requires_grad))
        vars(self).update(attributes)
        if hooks is not None:  # of the gradient: what calls them stayed with the other tensor
            self._backward_hooks = hooks

    data = torch.Tensor.data

    def type_name(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            answer = original(self, *args, **kwargs)
            if isinstance(answer, str):
                return re.sub(rf"^torch\.{kind}\.", "torch.cuda.", answer)
            return answer

        return tensor_type

    def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from loongplug.models.layers.norm import _HostRMSNorm

        return _HostRMSNorm.apply(x, weight, eps)

    def index(device: Any) -> int:
        found = device_of(device)
        return extension.current_device() if found is None else found.index

    def synchronize(device: Any = None) -> None:
        extension.synchronize(index(device))

    def current_stream(device: Any = None) -> Any:
        return torch.accelerator.current_stream(device_of(device) or current())

    properties = SimpleNamespace(
        name="stand-in", major=8, minor=0, total_memory=24 << 30, multi_processor_count=1
    )
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: extension.DEVICES,
        "current_device": current,
        "set_device": lambda device: extension.set_device(index(device)),
        "synchronize": synchronize,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "stand-in",
        "memory_allocated": lambda device=None: extension.allocated(index(device)),
        "max_memory_allocated": lambda device=None: extension.peak(index(device)),
        "memory_reserved": lambda device=None: extension.allocated(index(device)),
        "max_memory_reserved": lambda device=None: extension.peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index(device)),
        "memory_stats": lambda device=None: {},
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "set_stream": torch.accelerator.set_stream,
        "stream": on_stream,
        "_lazy_call": lambda call, **more: call(),
        "_lazy_init": lambda: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "random.get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "random.set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: None,
        "default_generators": _Generators(),
    }
    rows = [_row(f"torch.cuda.{name}", replacement=value) for name, value in names.items()]
    rows += [_row(f"torch.{name}", wrapper=factory) for name in FACTORIES]
    rows += [
        _row("torch.Tensor.to", wrapper=tensor_to),
        _row("torch.Tensor.cuda", replacement=tensor_cuda),
        _row("torch.Tensor.is_cuda", replacement=property(lambda self: self.device.type == kind)),
        _row("torch.Tensor.data", replacement=property(data.__get__, set_data)),
        _row("torch.Tensor.type", wrapper=type_name),
        _row("torch.nn.Module._apply", wrapper=apply_in_place),
        # A device's one kernel for it: here, what the CPU does instead of torch's composition.
        _row("torch.nn.functional.rms_norm", replacement=rms_norm),
        # What gloo serves: it wants parts of equal size.
        _row("torch.distributed.all_gather", wrapper=_if_uneven(exchanged_all_gather)),
        _row("torch.distributed.reduce_scatter", wrapper=_if_uneven(exchanged_reduce_scatter)),
    ]
    # ``with torch.device(...)`` knows factories by a set made at its first use: of torch's own.
    torch.utils._device._device_constructors()
    return ReplacementTable("stand-in", rows)


def _if_uneven(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` for lists of unequal tensors alone: the device's own serves the others."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        exchanged = wrapper(original)

        @functools.wraps(original)
        def call(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
            pieces = second if isinstance(first, torch.Tensor) else first
            alike = len({each.shape for each in pieces}) == 1
            return (original if alike else exchanged)(first, second, *args, **kwargs)

        return call

    return wrap


def _row(target: str, *, replacement: Any = None, wrapper: Any = None) -> Replacement:
    return Replacement(
        target=target, reason="is the stand-in's", replacement=replacement, wrapper=wrapper
    )
