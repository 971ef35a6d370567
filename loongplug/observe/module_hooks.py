"""Forward and backward of encoders and projectors, which the schedule does not see by themselves.

A backward begins when the first gradient reaches a module's outputs. Its inputs are pixels, which
need no gradient, so nothing tells of its end: it is taken to last until the next watched module's
backward begins, or until autograd's pass ends. Autograd runs what was made first last, so that is
when the encoder's backward is done.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from loongplug.observe.recorder import Recorder, Span

# A chunk's own modules whose names end so are watched.
_WATCHED = ("_encoder", "_projector")


class ModuleHooks:
    """Hooks on the modules of one rank that report to one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[RemovableHandle] = []
        self._forward: list[Span] = []
        self._backward: tuple[str, Span] | None = None
        self.watching = False

    def watch(self, model: Sequence[torch.nn.Module]) -> None:
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

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        def before(module: torch.nn.Module, inputs: Any) -> None:
            self._forward.append(self._recorder.span("encoder_forward", name))

        def after(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
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
