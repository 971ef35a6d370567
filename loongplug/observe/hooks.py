"""What the functions of a training step report; ``tracing.py`` puts it in place."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from loongplug.observe.recorder import Phase, Recorder, Span, TraceRecorder

# The argument whose bytes count. In a gather and a scatter, that is the whole, not the share.
PAYLOADS: dict[str, str | None] = {
    **dict.fromkeys(("all_reduce", "broadcast", "send", "recv"), "tensor"),
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
}

Given = dict[str, Any]
Call = Callable[[], Any]
Around = Callable[[Given, Call], Any]


def reported(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """``original`` as ``around`` calls it, which sees all arguments by name and may change them."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return around(bound.arguments, lambda: original(*bound.args, **bound.kwargs))

    return wrapped


def bytes_of(payload: Any) -> int:
    """The bytes of a tensor, or of a list of tensors."""
    if isinstance(payload, Tensor):
        return payload.numel() * payload.element_size()
    return sum(bytes_of(each) for each in payload or ())


def group_details(group: Any) -> dict[str, Any]:
    """A process group's kind, as Megatron names it, and its size."""
    if group is None or group is dist.group.WORLD:
        return {"group": "world", "size": dist.get_world_size()}
    kind = getattr(group, "group_desc", "") or "unnamed"
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


class StepHooks:
    """What is done around each function of a training step: it is reported to one recorder."""

    def __init__(self, recorder: TraceRecorder, *, on_first_model: Callable[[], None]) -> None:
        """``on_first_model`` is called once, when the rank has its device and its model."""
        self._recorder = recorder
        self.modules = ModuleHooks(recorder)
        self._on_first_model = on_first_model
        # Microbatch and chunk by the id of what a forward gave, which the schedule keeps for the
        # backward.
        self._of_output: dict[int, tuple[int | None, int]] = {}

    def _meet(self, model: Sequence[nn.Module]) -> None:
        if not self.modules.watching:
            self.modules.watch(model)
            self._on_first_model()

    def train_step(self, given: Given, call: Call) -> Any:
        """A whole step, by its number from 1."""
        self._meet(given["model"])
        self._of_output.clear()
        with self._recorder.in_step(given["iteration"] + 1):
            return call()

    def evaluate(self, given: Given, call: Call) -> Any:
        """All of one evaluation."""
        self._meet(given["model"])
        with self._recorder.span("evaluation", "evaluation"):
            return call()

    def forward_step(self, given: Given, call: Call) -> Any:
        """The forward of one microbatch in one chunk, and its data."""
        microbatch, chunk = given["current_microbatch"], given["vp_stage"] or 0
        if given["data_iterator"] is not None:
            given["data_iterator"] = self._data(given["data_iterator"], microbatch)
        with self._recorder.span("forward", "forward", microbatch=microbatch, chunk=chunk):
            result = call()
        self._remember(result[0], microbatch, chunk)
        return result

    def _data(self, source: Iterator[Any], microbatch: int | None) -> Iterator[Any]:
        """Microbatches, of which each is reported as it comes."""
        while True:
            with self._recorder.span("data", "next microbatch", microbatch=microbatch):
                try:
                    data = next(source)
                except StopIteration:
                    return
            yield data

    def backward_step(self, given: Given, call: Call) -> Any:
        """The backward of one microbatch in one chunk."""
        microbatch, chunk = self._recall(given["output_tensor"])
        with self._recorder.span("backward", "backward", microbatch=microbatch, chunk=chunk):
            return call()

    def combined_step(self, given: Given, call: Call) -> Any:
        """One chunk's forward overlapped with one chunk's backward, either of which may lack."""
        details: dict[str, Any] = {}
        microbatch, chunk = given["current_microbatch"], given["f_model_chunk_id"] or 0
        if given["f_model"] is not None:
            details |= {"microbatch": microbatch, "chunk": chunk}
        if given["b_model"] is not None:
            its, of = self._recall(given["b_output_tensor"])
            details |= {"backward_microbatch": its, "backward_chunk": of}
        with self._recorder.span("forward_backward", "forward with backward", **details):
            result = call()
        if given["f_model"] is not None:
            self._remember(result[0], microbatch, chunk)
        return result

    def _remember(self, output: Any, microbatch: int | None, chunk: int) -> None:
        if torch.is_grad_enabled():
            self._of_output[_identity(output)] = microbatch, chunk

    def _recall(self, output: Any) -> tuple[int | None, int | None]:
        return self._of_output.pop(_identity(output), (None, None))

    def whole(self, phase: Phase, name: str) -> Around:
        """A call from its beginning to its end, by this name."""

        def around(given: Given, call: Call) -> Any:
            with self._recorder.span(phase, name):
                return call()

        return around

    def pipeline_transfer(self, given: Given, call: Call) -> Any:
        """What a stage sends to and receives from its neighbours in one call, in bytes each."""
        communicator, name = given["self"], _directions(given)
        if not name:
            return call()
        with self._recorder.span(
            "p2p",
            name,
            sent_next=bytes_of(given["tensor_send_next"]),
            sent_previous=bytes_of(given["tensor_send_prev"]),
            next=communicator.next_rank,
            previous=communicator.prev_rank,
            **group_details(communicator.pp_group),
        ) as span:
            from_previous, from_next, requests = call()
            span.note(received_previous=bytes_of(from_previous), received_next=bytes_of(from_next))
        if isinstance(requests, dict):
            requests = {
                key: ReportedWork(work, self._recorder, key.replace("_", " "))
                for key, work in requests.items()
            }
        return from_previous, from_next, requests

    def collective(self, name: str) -> Around:
        """A function of torch.distributed, its bytes on this rank, its group."""
        payload = PAYLOADS[name]

        def around(given: Given, call: Call) -> Any:
            group = given["group"]
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return call()
            size = bytes_of(given[payload]) if payload else 0
            with self._recorder.span("collective", name, bytes=size, **group_details(group)):
                work = call()
            # send and recv give a rank.
            if work is None or isinstance(work, int):
                return work
            return ReportedWork(work, self._recorder, name)

        return around


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


# A chunk's own modules whose names end so are watched.
_WATCHED = ("_encoder", "_projector")


class ModuleHooks:
    """Forward and backward of encoders and projectors, which the schedule does not see apart.

    A backward begins when the first gradient reaches a module's outputs. Its inputs are pixels,
    which need no gradient, so nothing tells of its end: it is taken to last until the next watched
    module's backward begins, or until autograd's pass ends, which runs what was made first last.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[RemovableHandle] = []
        self._forward: list[Span] = []
        self._backward: tuple[str, Span] | None = None
        self.watching = False

    def watch(self, model: Sequence[nn.Module]) -> None:
        """Hook the encoders and projectors of a rank's chunks."""
        self.watching = True
        for chunk in model:
            for path, module in chunk.named_modules():
                name = path.rpartition(".")[2]
                if name.endswith(_WATCHED):
                    self._hook(name, module)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(*_: Any) -> None:
            self._forward.append(self._recorder.span("encoder_forward", name))

        def after(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self._forward.pop().end()
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._gradient_came(name))

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _gradient_came(self, name: str) -> None:
        if self._backward is not None:
            current, span = self._backward
            if current == name:
                return
            span.end()
        else:
            cast(Any, Variable)._execution_engine.queue_callback(self._pass_ended)
        self._backward = name, self._recorder.span("encoder_backward", name)

    def _pass_ended(self) -> None:
        assert self._backward is not None
        self._backward[1].end()
        self._backward = None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """All tensors of a module's outputs: of tuples, lists, and objects that hold such."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list)):
        for each in outputs:
            yield from _tensors(each)
    elif hasattr(outputs, "__dict__"):
        yield from _tensors(tuple(vars(outputs).values()))
