"""Milliseconds of one decoder layer, forward and backward, within a run.

A layer's neighbours have the stamps: its forward lies between its input's arrival and that of the
next layer's input, its backward between the two inputs' gradients. The first and the last layer
are left out, and all hooks together cost two events a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpu_steps.timing import milliseconds, stamp, wait_for


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Medians over microbatches, of an average layer."""

    forward_ms: float
    backward_ms: float


class LayerClock:
    """Hooks on ``layers``, which follow each other in a model; at least 3."""

    def __init__(self, layers: Sequence[nn.Module], *, device: str) -> None:
        assert len(layers) >= 3, "the first and the last are left out"
        self._device = device
        self._count = len(layers)
        # Of each layer, one stamp a microbatch.
        self._forward: list[list[Any]] = [[] for _ in layers]
        self._backward: list[list[Any]] = [[] for _ in layers]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def times(self) -> LayerTimes:
        """The first microbatch, which warms up, is left out where there are more."""
        wait_for(self._device)
        return LayerTimes(
            forward_ms=self._between(self._forward[1], self._forward[-1]),
            backward_ms=self._between(self._backward[-1], self._backward[1]),
        )

    def _between(self, begins: Sequence[Any], ends: Sequence[Any]) -> float:
        spans = [milliseconds(*pair) for pair in zip(begins, ends, strict=True)]
        return median(spans[1:] or spans) / (self._count - 2)

    def _hook(self, number: int) -> Any:
        def arrives(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = _hidden_states(args, kwargs)
            if not states.requires_grad:
                return  # an evaluation
            self._forward[number].append(stamp(self._device))
            states.register_hook(self._gradient(number))

        return arrives

    def _gradient(self, number: int) -> Any:
        def arrives(gradient: Tensor) -> None:
            self._backward[number].append(stamp(self._device))

        return arrives


def _hidden_states(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    found = kwargs.get("hidden_states", args[0] if args else None)
    assert isinstance(found, torch.Tensor), "a decoder layer takes hidden states"
    return found
