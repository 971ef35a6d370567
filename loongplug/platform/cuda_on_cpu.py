"""What Megatron's CUDA calls mean on a CPU: they land on the host.

Upstream names CUDA where it means "the device": one table answers those names for the CPU.
Only names that upstream's training paths use are in it, and only those that fail, or that
mean something else, on a machine without a GPU. ``torch.cuda.is_available()`` stays False:
torch itself decides by it (fused optimizers, pinned memory, autocast).

Tensors keep torch's own dispatch: a global ``TorchFunctionMode`` would tax every operation.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loongplug.platform.devices import HOST, on_host
from loongplug.platform.gloo import (
    GlooOnOneDevice,
    exchanged_all_gather,
    exchanged_all_reduce,
    exchanged_gather_into_tensor,
    exchanged_reduce_scatter,
)
from loongplug.platform.multi_tensor import fused_adam
from loongplug.platform.replacements import Replacement, as_wrapper


class HostStream:
    """A CPU runs its work in the order of the calls: one queue, so all streams are equal."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(lowest, highest): there is one."""
        return (0, 0)

    def synchronize(self, *_: Any) -> None:
        """Nothing to wait for: all work before is done."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """An event at this point of the one queue."""
        return event or HostEvent()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return hash(HostStream)


class HostEvent:
    """A point in the one queue: it has always been reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        """Nothing to wait for: all work before is done."""

    record = wait = synchronize

    def query(self) -> bool:
        """Whether the work before the event is done."""
        return True


class _HostGenerators:
    """``torch.cuda.default_generators`` by any device: the host's one generator."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


# One function per replaced name: torch keeps tables by function object, and refuses one that
# stands under two names.
def _answers(value: Any = None) -> Callable[..., Any]:
    """A new function that answers ``value`` whatever it is given."""
    return lambda *_, **__: value


def _another(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


def _lazy_call(call: Callable[[], object], **_: Any) -> None:
    call()


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


@as_wrapper
def _device_type_name(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type()`` that answers torch.cuda.FloatTensor for a float tensor on the host."""
    answer = original(self, *args, **kwargs)
    if isinstance(answer, str):
        return re.sub(r"^torch\.(?=\w+Tensor$)", "torch.cuda.", answer)
    return answer


def _row(target: str, reason: str, replacement: Any = None, **options: Any) -> Replacement:
    return Replacement(target=target, reason=reason, replacement=replacement, **options)


_FACTORY = "upstream calls it with device='cuda' (or pinned, as a stop on the way there)"
_DRIVER = "asks the CUDA driver, which is not there"
_ONE_QUEUE = "streams and events order GPU work; a CPU has one queue"
_RNG = "upstream's RNG tracker keeps the state of the device's generator: here the host's"
_RING = "gloo's ring waits for a thread of another process once a step; one exchange waits once"
_UNEVEN = "experts' tokens differ in number from rank to rank, and gloo wants equal sizes"

CPU_ROWS: tuple[Replacement, ...] = (
    _row("torch.cuda.current_device", "upstream gives it as device=; answers the host's device",
         _answers(HOST), parameters="()"),
    _row("torch.cuda.device_count", "initialize_megatron makes no model-parallel groups and no "
         "RNG tracker where it is 0", _answers(1), parameters="()"),
    _row("torch.cuda.set_device", _DRIVER, _answers()),
    _row("torch.cuda.synchronize", _DRIVER + "; timers, p2p and checkpoints call it", _answers()),
    _row("torch.cuda.reset_peak_memory_stats", _DRIVER, _answers()),
    _row("torch.cuda.is_current_stream_capturing", _DRIVER, _answers(False)),
    _row("torch.cuda.Stream", _ONE_QUEUE, HostStream),
    _row("torch.cuda.Event", _ONE_QUEUE, HostEvent),
    _row("torch.cuda.current_stream", _ONE_QUEUE, _answers(HostStream())),
    _row("torch.cuda.default_stream", _ONE_QUEUE, _answers(HostStream())),
    _row("torch.cuda.set_stream", _ONE_QUEUE, _answers()),
    _row("torch.cuda.stream", _ONE_QUEUE, _stream),
    _row("torch.Tensor.record_stream", _ONE_QUEUE, _answers()),
    _row("torch.cuda._lazy_call", "waits for a CUDA start that never comes; "
         "tensor_parallel.random sets RNG states through it", _lazy_call),
    _row("torch.cuda._lazy_init", _DRIVER, _answers()),
    _row("torch.cuda.get_rng_state", _RNG, _get_rng_state),
    _row("torch.cuda.random.get_rng_state", _RNG, _another(_get_rng_state)),
    _row("torch.cuda.set_rng_state", _RNG, _set_rng_state),
    _row("torch.cuda.random.set_rng_state", _RNG, _another(_set_rng_state)),
    _row("torch.cuda.manual_seed", _RNG, _manual_seed),
    _row("torch.cuda.default_generators", _RNG, _HostGenerators()),
    *(_row(f"torch.{name}", _FACTORY, wrapper=on_host)
      for name in ("tensor", "empty", "empty_like", "zeros", "ones", "rand")),
    _row("torch.Tensor.cuda", "the host's tensors are where they belong", _itself),
    _row("torch.Tensor.pin_memory", "pinning needs the CUDA driver; offload buffers are pinned",
         _another(_itself)),
    _row("torch.Tensor.type", "the optimizers take parameters by type name and know only "
         "torch.cuda ones", wrapper=_device_type_name),
    _row("torch.optim.adam._single_tensor_adam", "goes over its tensors eight times, and over a "
         "model's hundreds of small ones in Python", wrapper=fused_adam),
    _row("torch.distributed.distributed_c10d.ProcessGroupGloo", "makes a device with a thread of "
         "its own for each group", wrapper=GlooOnOneDevice),
    _row("torch.distributed.all_gather", _UNEVEN, wrapper=exchanged_all_gather),
    _row("torch.distributed.reduce_scatter", _UNEVEN, wrapper=exchanged_reduce_scatter),
    _row("torch.distributed.all_reduce", _RING, wrapper=exchanged_all_reduce),
    _row("torch.distributed.all_gather_into_tensor", _RING, wrapper=exchanged_gather_into_tensor),
    _row("torch.distributed.reduce_scatter_tensor", _RING,
         wrapper=exchanged_reduce_scatter),
)  # fmt: skip
