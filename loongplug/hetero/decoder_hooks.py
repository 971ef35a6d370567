"""Where the decoder's passes, and the schedule around them, come back to who encodes."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from loongplug.models.multimodal import MultimodalModel


def unwrapped(chunk: Any) -> MultimodalModel:
    """Megatron hands chunks on with or without its wrappers."""
    model: MultimodalModel = get_attr_wrapped_model(chunk, "encoders", return_model_obj=True)
    return model


def before_backward(output: Any, call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward of what a forward step gave begins."""
    if isinstance(output, AbstractSchedulePlan):  # of how to come to an output
        output.on_backward(call)
    elif output.requires_grad:
        output.register_hook(lambda gradient_of_output: call())


class FeaturesNode(torch.autograd.Function):
    """Where features come from, and their gradient goes to, in the decoder's graph.

    Has an input without values, since the graph goes no further than inputs that need it.
    """

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, take: Callable[[], Tensor], came: Callable[[Tensor], None]
    ) -> Tensor:
        """``take`` gives the features; ``came`` is called with their gradient."""
        ctx.came = came
        return take()

    @staticmethod
    def backward(ctx: Any, gradient_of_features: Tensor) -> tuple[None, None, None]:
        """Nothing goes further in this graph."""
        ctx.came(gradient_of_features)
        return None, None, None


class Waiting:
    """Stands in for a function that is to be called later, with what it was called with."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((args, kwargs))

    def release(self, function: Callable[..., Any] | None) -> None:
        """Call it, as often as this was."""
        for args, kwargs in self._calls:
            assert function is not None
            function(*args, **kwargs)
