"""The encoder's parameters, gradients and optimizer state, on the host while the decoder works."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from torch import Tensor, nn

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.stepped import Schedule
from loongplug.hetero.timing import Timing
from loongplug.models.features import VisionFeatures
from loongplug.parallel.module_ddp import bucket_groups_of
from loongplug.platform import Platform


@dataclass(kw_only=True)
class _Moved:
    """A storage that has left, or leaves.

    ``device`` is all of it, [nbytes] uint8, and ``host`` its content; None where it comes back as
    zeros.
    """

    device: Tensor
    nbytes: int
    host: Tensor | None


class EncoderState:
    """Moves what a rank holds for its encoder between device and host.

    Whole storages move: what they are on the device is released and later restored, so that
    parameters, Megatron's flat buffers, its optimizers' shards and all views of them stay the
    objects that they are. Gradients are zero whenever this state leaves, and so are not copied.

    ``leave`` and ``send_for`` only queue copies. The memory is free from ``let_go`` on, and what
    was sent for may be used from ``back`` on.
    """

    def __init__(
        self, part: DistributedDataParallel, optimizers: Sequence[Any], *, platform: Platform
    ) -> None:
        self._part = part
        self._optimizers = optimizers
        self._platform = platform
        self._copies = platform.copies()
        self._hosts: dict[int, Tensor] = {}  # kept for the next step, by the storage's address
        self._moved: list[_Moved] = []
        self._mark: Any = None  # behind the copies under way
        self._released = False

    def leave(self) -> None:
        """All that there is sets out; until ``let_go`` it may be used, but not changed."""
        assert not self._moved
        assert all(group.param_gather_handle is None for group in bucket_groups_of(self._part))
        values = {_address(each): each for each in self._values()}
        zeros = {_address(each): each for each in self._gradients()}
        hosts, self._hosts = self._hosts, {}
        self._copies.follow()
        for address, tensor in values.items():
            device = _bytes_of(tensor)
            host = hosts.get(address)
            if host is None or host.shape != device.shape:
                host = self._copies.host_like(device)
            self._copies.copy(host, device)
            self._hosts[address] = host
            self._moved.append(_Moved(device=device, nbytes=device.nbytes, host=host))
        for address, tensor in zeros.items():
            if address not in values:
                device = _bytes_of(tensor)
                self._moved.append(_Moved(device=device, nbytes=device.nbytes, host=None))
        self._mark = self._copies.mark()

    def let_go(self) -> None:
        """Free its memory, if it has not been already."""
        if not self._moved or self._released:
            return
        self._copies.wait(self._mark)
        for each in self._moved:
            self._platform.release(each.device.untyped_storage())
        self._released = True

    def send_for(self) -> None:
        """It sets out on its way back, if it has left."""
        if not self._released:
            return
        for each in self._moved:
            self._platform.restore(each.device.untyped_storage(), each.nbytes)
        self._copies.follow()
        for each in self._moved:
            if each.host is not None:
                self._copies.copy(each.device, each.host)
            else:
                each.device.zero_()
        self._mark = self._copies.mark()
        self._released = False

    def back(self) -> None:
        """It is there from now on."""
        self.send_for()
        if self._moved:
            self._copies.wait(self._mark)
        self._moved.clear()

    def _values(self) -> Iterator[Tensor]:
        """What has to come back as it was."""
        yield from self._on_device(self._part.module.parameters())
        for buffer in self._buffers():
            if buffer.param_data is not None:
                yield from self._on_device([buffer.param_data])
        for optimizer in self._optimizers:
            inner = getattr(optimizer, "optimizer", None)
            if inner is None:  # of a rank without parameters
                continue
            for group in inner.param_groups:
                yield from self._on_device(group["params"])
            for state in inner.state.values():
                yield from self._on_device(each for each in state.values())

    def _gradients(self) -> Iterator[Tensor]:
        for buffer in self._buffers():
            yield from self._on_device([buffer.grad_data, *buffer.extra_main_grads])

    def _on_device(self, values: Iterable[Any]) -> Iterator[Tensor]:
        for each in values:
            if torch.is_tensor(each) and each.device == self._platform.device and each.numel():
                yield each

    def _buffers(self) -> list[Any]:
        return [*self._part.buffers, *self._part.expert_parallel_buffers]


class StateAway:
    """A timing during whose phase 2 the encoder's state is on the host.

    Where the schedule has several microbatches in flight (``beside``), the state leaves beside the
    first forward and comes back beside the last backward, when most activations are not there yet
    or any more. On the last stage, without a pipeline, or in a step of one microbatch, one
    microbatch in flight is all there ever is: to take less memory, the state has to be gone before
    the first forward and come back after the last backward. A last stage waits for the others
    then anyway.
    """

    def __init__(self, timing: Timing, *, platform: Platform, beside: bool) -> None:
        self._timing = timing
        self._platform = platform
        self._beside = beside
        self._state: EncoderState | None = None

    def built(self, part: DistributedDataParallel, optimizers: Sequence[Any]) -> None:
        """The encoder's data parallel wrapper and its optimizers, before the first step."""
        self._state = EncoderState(part, optimizers, platform=self._platform)

    def begin(
        self, chunk: nn.Module, microbatches: Sequence[Microbatch], *, training: bool
    ) -> None:
        """As the timing's; then the state leaves."""
        assert self._state is not None
        self._timing.begin(chunk, microbatches, training=training)
        self._state.leave()
        if not self._moves_beside(len(microbatches)):
            self._state.let_go()

    def features(self, number: int) -> VisionFeatures:
        """As the timing's."""
        return self._timing.features(number)

    def end(self) -> None:
        """The state is back; then as the timing's."""
        assert self._state is not None
        self._state.back()
        self._timing.end()

    def around(self, schedule: Schedule) -> Schedule:
        """``schedule`` with the transfers beside it."""

        def forward_backward(
            *,
            forward_step_func: Callable[..., Any],
            model: Any,
            num_microbatches: int,
            **options: Any,
        ) -> Any:
            assert self._state is not None
            if self._moves_beside(num_microbatches):
                chunks = len(model) if isinstance(model, list) else 1
                steps = num_microbatches * chunks
                forward_step_func = _Watched(forward_step_func, self._state, steps=steps)
            return schedule(
                forward_step_func=forward_step_func,
                model=model,
                num_microbatches=num_microbatches,
                **options,
            )

        return forward_backward

    def _moves_beside(self, microbatches: int) -> bool:
        return self._beside and microbatches > 1


class _Watched:
    """A forward step that tells the state of the second forward and the last backward."""

    def __init__(
        self, forward_step: Callable[..., Any], state: EncoderState, *, steps: int
    ) -> None:
        self._forward_step = forward_step
        self._state = state
        self._forwards = 0
        self._backwards_left = steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._forwards += 1
        if self._forwards == 2:
            self._state.let_go()
        output, loss = self._forward_step(*args, **kwargs)
        if isinstance(output, AbstractSchedulePlan):  # of how to come to an output
            output.on_backward(self._backward_begins)
        elif output.requires_grad:
            output.register_hook(lambda gradient: self._backward_begins())
        return output, loss

    def _backward_begins(self) -> None:
        self._backwards_left -= 1
        if self._backwards_left == 0:
            self._state.send_for()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(tensor.untyped_storage())
