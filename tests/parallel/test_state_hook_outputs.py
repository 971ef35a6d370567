"""What a hooked module returns, and hooks beside those of the state."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from state_parts import make_parts, states_of
from state_ranks import AUDIO, DECODER, ENCODER, in_one_rank
from torch import nn

from loongplug.parallel.hooks import run_in_state
from loongplug.parallel.states import (
    PARALLEL_STATES,
)


@dataclass(frozen=True)
class _Features:
    tensor: torch.Tensor
    others: Any
    name: str = "features"


class _Pair(NamedTuple):
    left: Any
    right: Any


class _Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    ("make", "find"),
    [
        (lambda x: x, lambda out: [out]),
        (lambda x: (x, None, 3), lambda out: [out[0]]),
        (lambda x: [x, [2 * x]], lambda out: [out[0], out[1][0]]),
        (lambda x: {"a": {"b": x}}, lambda out: [out["a"]["b"]]),
        (lambda x: _Pair(x, (x + 1,)), lambda out: [out.left, out.right[0]]),
        (
            lambda x: _Features(x, {"deep": [x + 1]}),
            lambda out: [out.tensor, out.others["deep"][0]],
        ),
    ],
)
@in_one_rank
def test_outputs_of_all_kinds(make: Any, find: Any) -> None:
    module = _Returns(make)
    plain = module(torch.ones(2, 4))
    run_in_state(module, ENCODER)
    seen: list[str] = []
    module.linear.weight.register_hook(lambda _: seen.append(PARALLEL_STATES.current))
    out = module(torch.ones(2, 4))
    assert type(out) is type(plain)
    for one, other in zip(find(out), find(plain), strict=True):
        assert torch.equal(one, other)
    for tensor in find(out):
        seen.clear()
        tensor.sum().backward(retain_graph=True)
        assert seen == [ENCODER]


@in_one_rank
def test_outputs_without_gradients_are_the_same_objects() -> None:
    kept = {"ids": torch.tensor([1]), "list": [torch.ones(1)]}
    module = _Returns(lambda x: (x, kept, None))
    run_in_state(module, ENCODER)
    out = module(torch.ones(2, 4))
    assert out[1] is kept
    with torch.no_grad():
        module.make = lambda x: kept
        assert module(torch.ones(2, 4)) is kept


@in_one_rank
def test_one_tensor_twice_stays_one_tensor() -> None:
    module = _Returns(lambda x: [x, x])
    run_in_state(module, ENCODER)
    first, second = module(torch.ones(2, 4))
    assert first is second


@in_one_rank
def test_outputs_can_be_changed_in_place() -> None:
    module = _Returns(lambda x: x)
    run_in_state(module, ENCODER)
    out = module(torch.ones(2, 4))
    assert out._base is None
    out.mul_(3)
    out.sum().backward()
    assert torch.equal(module.linear.bias.grad, torch.full((4,), 6.0))
    # As without hooks: what the module needs for its backward must not be changed.
    module.make = torch.exp
    out = module(torch.ones(2, 4))
    out.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@in_one_rank
def test_nothing_is_kept_alive() -> None:
    module = _Returns(lambda x: x)
    run_in_state(module, ENCODER)
    gc.collect()
    gc.disable()
    activations = []
    module.linear.register_forward_hook(
        lambda *hooked: activations.append(weakref.ref(hooked[2])) or None
    )
    out = module(torch.ones(2, 4))
    out.sum().backward()
    del out
    module(torch.ones(2, 4))  # and without a backward
    assert [ref() for ref in activations] == [None, None]


# Hooks


@in_one_rank
def test_hooks_can_be_taken_off() -> None:
    seen, (encoder,) = make_parts("encoder")
    hooks = run_in_state(encoder, ENCODER)
    hooks.remove()
    encoder(torch.randn(3, 4)).sum().backward()
    assert states_of(seen, "encoder") == {DECODER}
    run_in_state(encoder, ENCODER)


@in_one_rank
def test_a_copy_runs_in_the_state_too() -> None:
    module = _Returns(lambda x: x)
    run_in_state(module, ENCODER)
    module(torch.ones(2, 4))
    other = copy.deepcopy(module)
    seen: list[str] = []
    other.linear.weight.register_hook(lambda _: seen.append(PARALLEL_STATES.current))
    other(torch.ones(2, 4)).sum().backward()
    assert seen == [ENCODER]
    assert module.linear.weight.grad is None


@in_one_rank
def test_hooks_that_cannot_be() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="there is no parallel state 'image_encodr'"):
        run_in_state(module, "image_encodr")
    run_in_state(module, ENCODER)
    with pytest.raises(ValueError, match="Linear runs in 'image_encoder' already"):
        run_in_state(module, AUDIO)


@in_one_rank
def test_other_hooks_that_fail() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("another hook")

    module = nn.Linear(2, 2)
    run_in_state(module, ENCODER)
    for register in (
        lambda: module.register_forward_pre_hook(fail),
        lambda: module.register_forward_pre_hook(fail, prepend=True),
        lambda: module.register_forward_hook(fail),
        lambda: module.register_forward_hook(fail, prepend=True),
    ):
        handle = register()
        with pytest.raises(ValueError, match="another hook"):
            module(torch.ones(2))
        handle.remove()
        assert PARALLEL_STATES.current == DECODER
    module(torch.ones(2)).sum().backward()
