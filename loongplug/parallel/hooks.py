"""A module runs in its parallel state: forward, backward, and what is recomputed.

Forward hooks switch around the forward. For the backward, a small autograd node stands behind
each output and one more in front of the module:

    Leave ----------------------------> token --+
                                                |
    inputs -> the module's own nodes -> output -+-> Enter -> output, as others see it

A backward comes to Enter first, which switches to the module's state. The token leads straight
to Leave, which switches back. autograd runs, of the nodes that are ready, the one that was made
last; Leave was made before every node of the module, and after all that made the inputs, so it
runs between the two. That does not depend on the inputs: pixels need no gradients, nor do ids.

A backward that fails, or that is asked for some gradients only and never comes to Leave, ends in
the state that it began in: a callback of the whole backward sees to that.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from loongplug.parallel.states import PARALLEL_STATES
from loongplug.platform import current_platform


class StateHooks:
    """The hooks of one module; see :func:`run_in_state`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self._leaf: torch.Tensor | None = None
        self._forwards: list[_Forward] = []  # those in progress, the innermost last
        self._handles = (
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        )

    def remove(self) -> None:
        """Let the module run in whatever state it is called in."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        forward = _Forward(PARALLEL_STATES.current)
        # First of all: torch calls the hook behind the forward also when the rest fails.
        self._forwards.append(forward)
        PARALLEL_STATES.switch(self.name)
        if torch.is_grad_enabled():
            forward.call = _Call(self.name, self._leaf_for(module))
            forward.token = _Leave.apply(forward.call, forward.call.leaf)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not self._forwards:
            return None  # another hook failed before ours was called
        forward = self._forwards.pop()
        if forward.before is not None:
            PARALLEL_STATES.switch(forward.before)
        if forward.token is None:
            return None

        def behind(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            return _Enter.apply(forward.call, tensor, forward.token)

        return _map_tensors(output, behind)

    def _leaf_for(self, module: nn.Module) -> torch.Tensor:
        """What Leave is made from. It has to be where the module computes: autograd has a
        queue per device, and only within one queue the order is the one that is needed."""
        parameter = next(module.parameters(), None)
        device = current_platform().device if parameter is None else parameter.device
        if self._leaf is None or self._leaf.device != device:
            self._leaf = torch.zeros((), device=device, requires_grad=True)
        return self._leaf


def run_in_state(module: nn.Module, name: str) -> StateHooks:
    """Have ``module`` run in the parallel state ``name`` from now on, wherever it is called from.

    Forward, backward and recomputed forwards run in that state, and each is followed by the
    state that was there before, also when it fails. Values and gradients are those of the
    module without hooks. Modules inside may have states of their own. Ranks do not talk.

    Only calls of the module are seen (``module(...)``), not of its methods. Of outputs, tensors
    are found in tuples, lists, dictionaries and dataclasses. A checkpoint that recomputes the
    whole module gives it its groups, but draws new random numbers: recompute inside the module
    where it has dropout.

    Raises:
        ValueError: there is no such state, or the module has hooks of this kind already.
        RuntimeError: this rank has no part in that state, or no state has been adopted yet.
    """
    PARALLEL_STATES.snapshot_of(name)
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, StateHooks):
            raise ValueError(
                f"{type(module).__name__} runs in {owner.name!r} already: remove() those hooks "
                f"before it can run in {name!r}."
            )
    return StateHooks(module, name)


@dataclass(slots=True)
class _Forward:
    """A forward in progress, and the state that it was called in."""

    before: str | None
    call: "_Call | None" = None
    token: torch.Tensor | None = None


@dataclass(slots=True)
class _Call:
    """What the nodes of one forward share. No tensor of the graph: nodes hold it, so that would
    be a circle that keeps the activations."""

    name: str
    leaf: torch.Tensor
    _backward: int = -1
    _before: str = ""

    def enter(self) -> None:
        """Switch to the module's state, at the first output's node of a backward."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        before = PARALLEL_STATES.current
        assert before is not None
        if backward not in PARALLEL_STATES.backwards:
            PARALLEL_STATES.backwards.add(backward)
            Variable._execution_engine.queue_callback(_EndOfBackward(backward, before))
        self._backward, self._before = backward, before
        PARALLEL_STATES.switch(self.name)

    def leave(self) -> None:
        PARALLEL_STATES.switch(self._before)


class _Leave(torch.autograd.Function):
    """A node in front of a module, the last of its nodes in a backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaf: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.call.leave()
        return None, None


class _Enter(torch.autograd.Function):
    """A node behind an output of a module; the identity."""

    @staticmethod
    def forward(ctx: Any, call: _Call, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Not a view of autograd's kind, which nobody could change in place.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.call.enter()
        # The token's must be a tensor on the device: none at all would be the host's to queue.
        return None, grads[0], ctx.call.leaf.detach()


@dataclass(frozen=True)
class _EndOfBackward:
    """Puts the state back that a backward began in.

    Called when the backward has succeeded. When it fails, autograd drops its callbacks before
    it raises, and this one then does the same.
    """

    backward: int
    before: str

    def __call__(self) -> None:
        if self.backward in PARALLEL_STATES.backwards:
            PARALLEL_STATES.backwards.remove(self.backward)
            PARALLEL_STATES.switch(self.before)

    def __del__(self) -> None:
        self()


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor replaced by what ``function`` makes of it.

    Each tensor is given to ``function`` once, however often it occurs. What has nothing
    replaced in it comes back as the same object; anything else is a shallow copy of its own
    type. Objects of other kinds are left as they are, with the tensors in them.
    """
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return _map(value, once)


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    items = _items(value)
    changed = {key: new for key, item in items.items() if (new := _map(item, function)) is not item}
    if not changed:
        return value
    if isinstance(value, tuple):
        parts = list((items | changed).values())
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    new = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, list | dict):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # a dataclass may be frozen
    return new


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return {}
