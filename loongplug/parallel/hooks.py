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

A backward that fails, or that is asked for some gradients only, never comes to Leave: whoever goes
on behind it has to switch.
"""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loongplug.parallel.states import PARALLEL_STATES
from loongplug.platform import current_platform


class _StateHooks:
    """The hooks of one module; see :func:`run_in_state`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._leaf: Tensor | None = None
        self._forwards: list[_Forward] = []  # those in progress, the innermost last
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        forward = _Forward(PARALLEL_STATES.current)
        # First of all: torch calls the hook behind the forward also when the rest fails.
        self._forwards.append(forward)
        PARALLEL_STATES.switch(self._name)
        if torch.is_grad_enabled():
            forward.call = _Call(self._name, self._leaf_for(module))
            forward.token = _Leave.apply(forward.call, forward.call.leaf)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        forward = self._forwards.pop()
        if forward.before is not None:
            PARALLEL_STATES.switch(forward.before)
        if forward.token is None:
            return None

        def behind(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            return _Enter.apply(forward.call, tensor, forward.token)

        return tree_map(partial(_mapped, function=behind, made={}), output)

    def _leaf_for(self, module: nn.Module) -> Tensor:
        """What Leave is made from. It has to be where the module computes: autograd has a
        queue per device, and only within one queue the order is the one that is needed."""
        parameter = next(module.parameters(), None)
        device = current_platform().device if parameter is None else parameter.device
        if self._leaf is None or self._leaf.device != device:
            self._leaf = torch.zeros((), device=device, requires_grad=True)
        return self._leaf


def run_in_state(module: nn.Module, name: str) -> None:
    """Have ``module`` run in the parallel state ``name`` from now on, wherever it is called from.

    Forward, backward and recomputed forwards run in that state, and each is followed by the
    state that was there before, a forward also when it fails. Values and gradients are those of the
    module without hooks. Modules inside may have states of their own. Ranks do not talk.

    Only calls of the module are seen (``module(...)``), not of its methods. Of outputs, tensors
    are found in tuples, lists, dictionaries and dataclasses. A checkpoint that recomputes the
    whole module gives it its groups, but draws new random numbers: recompute inside the module
    where it has dropout. Raises as :func:`~loongplug.parallel.states.parallel_state_of`.
    """
    PARALLEL_STATES.snapshot_of(name)
    _StateHooks(module, name)


@dataclass(slots=True)
class _Forward:
    """A forward in progress, and the state that it was called in."""

    before: str | None
    call: "_Call | None" = None
    token: Tensor | None = None


@dataclass(slots=True)
class _Call:
    """What the nodes of one forward share. No tensor of the graph: nodes hold it, so that would
    be a circle that keeps the activations."""

    name: str
    leaf: Tensor
    _backward: int = -1
    _before: str = ""

    def enter(self) -> None:
        """Switch to the module's state, at the first output's node of a backward."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        assert PARALLEL_STATES.current is not None
        self._backward, self._before = backward, PARALLEL_STATES.current
        PARALLEL_STATES.switch(self.name)

    def leave(self) -> None:
        PARALLEL_STATES.switch(self._before)


class _Leave(torch.autograd.Function):
    """A node in front of a module, the last of its nodes in a backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaf: Tensor) -> Tensor:
        ctx.call = call
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.call.leave()
        return None, None


class _Enter(torch.autograd.Function):
    """A node behind an output of a module; the identity."""

    @staticmethod
    def forward(ctx: Any, call: _Call, output: Tensor, _: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Not a view of autograd's kind, which nobody could change in place.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.call.enter()
        # The token's must be a tensor on the device: none at all would be the host's to queue.
        return None, grads[0], ctx.call.leaf.detach()


def _mapped(leaf: Any, *, function: Callable[[Tensor], Tensor], made: dict[int, Tensor]) -> Any:
    """A leaf of a tree with every tensor in it replaced by what ``function``, given it once, makes.

    Objects that torch's trees and dataclasses do not open are left with the tensors in them.
    """
    if isinstance(leaf, Tensor):
        if id(leaf) not in made:
            made[id(leaf)] = function(leaf)
        return made[id(leaf)]
    if is_dataclass(leaf) and not isinstance(leaf, type):
        within = partial(_mapped, function=function, made=made)
        return replace(leaf, **{name: tree_map(within, each) for name, each in vars(leaf).items()})
    return leaf
