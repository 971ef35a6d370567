"""What the functions of a training step report; ``tracing.py`` puts it in place.

Nothing here changes what a function is given or gives back, but for handles of transfers under
way, which report how long they are waited for.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from loongplug.observe.module_hooks import ModuleHooks
from loongplug.observe.recorder import Phase, Recorder, TraceRecorder

# The argument whose bytes count. In a gather and a scatter, that is the whole, not the share.
PAYLOADS: dict[str, str | None] = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "send": "tensor",
    "recv": "tensor",
    "barrier": None,
}

_Function = Callable[..., Any]


def bytes_of(payload: Any) -> int:
    """The bytes of a tensor, or of a list of tensors."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(bytes_of(each) for each in payload or ())


def group_details(group: Any) -> dict[str, Any]:
    """A process group's kind, as Megatron names it, and its size."""
    if group is None or group is dist.group.WORLD:
        return {"group": "world", "size": dist.get_world_size()}
    kind = str(getattr(group, "group_desc", "") or "unnamed")
    return {"group": kind.lower().replace("_group", ""), "size": group.size()}


@dataclass(eq=False)
class ReportedWork:
    """A transfer under way; reports how long it is waited for."""

    _work: Any
    _recorder: Recorder
    _name: str

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the transfer does."""
        with self._recorder.span("wait", self._name):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass(eq=False)
class _ReportedData:
    """An iterator over microbatches; reports how long each takes to come."""

    _source: Iterator[Any]
    _recorder: Recorder
    _microbatch: int | None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._recorder.span("data", "next microbatch", microbatch=self._microbatch):
            return next(self._source)


class StepHooks:
    """Wrappers of what a training step calls, all reporting to one recorder."""

    def __init__(self, recorder: TraceRecorder, *, on_first_model: Callable[[], None]) -> None:
        """``on_first_model`` is called once, when the rank has its device and its model."""
        self._recorder = recorder
        self._modules = ModuleHooks(recorder)
        self._on_first_model = on_first_model
        # Microbatch and chunk by the id of what a forward gave, which the schedule keeps for the
        # backward.
        self._of_output: dict[int, tuple[int | None, int]] = {}

    def close(self) -> None:
        """Take the hooks off the modules."""
        self._modules.close()

    def _meet(self, model: Sequence[torch.nn.Module]) -> None:
        if not self._modules.watching:
            self._modules.watch(model)
            self._on_first_model()

    def train_step(self, original: _Function) -> _Function:
        """A whole step, by its number from 1."""

        @functools.wraps(original)
        def train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            *args: Any,
            iteration: int,
            **kwargs: Any,
        ) -> Any:
            self._meet(model)
            self._of_output.clear()
            with self._recorder.in_step(iteration + 1):
                return original(
                    forward_step_func, data_iterator, model, *args, iteration=iteration, **kwargs
                )

        return train_step

    def evaluate(self, original: _Function) -> _Function:
        """All of one evaluation."""

        @functools.wraps(original)
        def evaluate(
            forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._meet(model)
            with self._recorder.span("evaluation", "evaluation"):
                return original(forward_step_func, data_iterator, model, *args, **kwargs)

        return evaluate

    def forward_step(self, original: _Function) -> _Function:
        """The forward of one microbatch in one chunk, and its data."""

        @functools.wraps(original)
        def forward_step(
            forward_step_func: Any,
            data_iterator: Any,
            *args: Any,
            current_microbatch: int | None = None,
            vp_stage: int | None = None,
            **kwargs: Any,
        ) -> Any:
            data = data_iterator
            if data is not None:
                data = _ReportedData(data, self._recorder, current_microbatch)
            chunk = vp_stage or 0
            with self._recorder.span(
                "forward", "forward", microbatch=current_microbatch, chunk=chunk
            ):
                output, tokens = original(
                    forward_step_func,
                    data,
                    *args,
                    current_microbatch=current_microbatch,
                    vp_stage=vp_stage,
                    **kwargs,
                )
            self._remember(output, current_microbatch, chunk)
            return output, tokens

        return forward_step

    def backward_step(self, original: _Function) -> _Function:
        """The backward of one microbatch in one chunk."""

        @functools.wraps(original)
        def backward_step(
            input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
        ) -> Any:
            microbatch, chunk = self._recall(output_tensor)
            with self._recorder.span("backward", "backward", microbatch=microbatch, chunk=chunk):
                return original(input_tensor, output_tensor, output_tensor_grad, config)

        return backward_step

    def combined_step(self, original: _Function) -> _Function:
        """One chunk's forward overlapped with one chunk's backward, either of which may lack."""

        @functools.wraps(original)
        def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            details: dict[str, Any] = {}
            forward = given["f_model"] is not None
            microbatch, chunk = given.get("current_microbatch"), given.get("f_model_chunk_id") or 0
            if forward:
                details |= {"microbatch": microbatch, "chunk": chunk}
            if given["b_model"] is not None:
                of_backward = self._recall(given["b_output_tensor"])
                details |= dict(
                    zip(("backward_microbatch", "backward_chunk"), of_backward, strict=True)
                )
            with self._recorder.span("forward_backward", "forward with backward", **details):
                result = original(*args, **kwargs)
            if forward:
                self._remember(result[0], microbatch, chunk)
            return result

        signature = inspect.signature(original)
        return combined_forward_backward_step

    def _remember(self, output: Any, microbatch: int | None, chunk: int) -> None:
        if torch.is_grad_enabled():
            self._of_output[_identity(output)] = microbatch, chunk

    def _recall(self, output: Any) -> tuple[int | None, int | None]:
        return self._of_output.pop(_identity(output), (None, None))

    def whole(self, phase: Phase, name: str | None = None) -> Callable[[_Function], _Function]:
        """A wrapper that reports a call from its beginning to its end."""

        def wrapper(original: _Function) -> _Function:
            said = name or original.__qualname__

            @functools.wraps(original)
            def reported(*args: Any, **kwargs: Any) -> Any:
                with self._recorder.span(phase, said):
                    return original(*args, **kwargs)

            return reported

        return wrapper

    def pipeline_transfer(self, original: _Function) -> _Function:
        """What a stage sends to and receives from its neighbours in one call, in bytes each."""

        @functools.wraps(original)
        def _communicate(communicator: Any, **kwargs: Any) -> Any:
            name = _directions(kwargs)
            if not name:
                return original(communicator, **kwargs)
            with self._recorder.span(
                "p2p",
                name,
                sent_next=bytes_of(kwargs["tensor_send_next"]),
                sent_previous=bytes_of(kwargs["tensor_send_prev"]),
                next=communicator.next_rank,
                previous=communicator.prev_rank,
                **group_details(communicator.pp_group),
            ) as span:
                from_previous, from_next, requests = original(communicator, **kwargs)
                span.note(
                    received_previous=bytes_of(from_previous), received_next=bytes_of(from_next)
                )
            if isinstance(requests, dict):
                requests = {
                    key: ReportedWork(work, self._recorder, key.replace("_", " "))
                    for key, work in requests.items()
                }
            return from_previous, from_next, requests

        return _communicate

    def collective(self, original: _Function) -> _Function:
        """A function of torch.distributed, its bytes on this rank, its group."""
        name = original.__name__
        payload = PAYLOADS[name]
        places = {key: place for place, key in enumerate(inspect.signature(original).parameters)}

        def argument(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = places[key]
            return args[place] if place < len(args) else kwargs.get(key)

        @functools.wraps(original)
        def reported(*args: Any, **kwargs: Any) -> Any:
            group = argument("group", args, kwargs)
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return original(*args, **kwargs)
            tensors = argument(payload, args, kwargs) if payload else None
            with self._recorder.span(
                "collective", name, bytes=bytes_of(tensors), **group_details(group)
            ):
                work = original(*args, **kwargs)
            # send and recv give a rank.
            if work is None or isinstance(work, int):
                return work
            return ReportedWork(work, self._recorder, name)

        return reported


def _identity(output: Any) -> int:
    """The id of a tensor, which schedules may hold in a list of one."""
    return id(output[0] if isinstance(output, list) else output)


def _directions(transfer: dict[str, Any]) -> str:
    """What one call of a stage does, in words; empty where it does nothing."""
    parts = {
        "send forward": transfer["tensor_send_next"] is not None,
        "receive forward": transfer["recv_prev"],
        "send backward": transfer["tensor_send_prev"] is not None,
        "receive backward": transfer["recv_next"],
    }
    return ", ".join(part for part, done in parts.items() if done)
