"""A module runs in its state: forward, backward and recomputation, whatever surrounds it."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from state_ranks import AUDIO, DECODER, ENCODER, in_one_rank
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from loongplug.parallel.hooks import run_in_state
from loongplug.parallel.states import PARALLEL_STATES, parallel_state_of


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, label: str, seen: list[tuple[str, str]]) -> torch.Tensor:
        ctx.label, ctx.seen = label, seen
        seen.append((f"{label} forward", PARALLEL_STATES.current))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.append((f"{ctx.label} backward", PARALLEL_STATES.current))
        return grads[0], None, None


class Part(nn.Module):
    """Something with weights that notes the state of every node that it can reach."""

    def __init__(self, label: str, seen: list[tuple[str, str]], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.label, self.seen, self.dropout = label, seen, dropout
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: seen.append((f"{label} {name}", PARALLEL_STATES.current))
            )

    def probe(self, x: torch.Tensor, where: str) -> torch.Tensor:
        return Probe.apply(x, f"{self.label} {where}", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.probe(self.first(self.probe(x, "begin")), "middle")
        if self.dropout:
            with get_cuda_rng_tracker().fork():
                x = torch.dropout(x, self.dropout, True)
            x = torch.dropout(x, self.dropout, True)
        return self.probe(self.second(gelu(x)), "end")


def states_of(seen: list[tuple[str, str]], label: str) -> set[str]:
    states = {state for each, state in seen if each.startswith(label)}
    assert states, label
    return states


def make_parts(*labels: str) -> tuple[list[tuple[str, str]], list[Part]]:
    torch.manual_seed(0)
    seen: list[tuple[str, str]] = []
    return seen, [Part(label, seen) for label in labels]


@pytest.mark.parametrize("pixels_need_grad", [False, True])
@in_one_rank
def test_forward_and_backward(pixels_need_grad: bool) -> None:
    seen, (before, encoder, after) = make_parts("before", "encoder", "after")
    run_in_state(encoder, ENCODER)
    pixels = torch.randn(3, 4)
    if pixels_need_grad:
        pixels = before(pixels)
    out = encoder(pixels)
    assert PARALLEL_STATES.current == DECODER
    after(out).sum().backward()
    assert PARALLEL_STATES.current == DECODER
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "after") == {DECODER}
    if pixels_need_grad:
        assert states_of(seen, "before") == {DECODER}
    # Every weight was seen, and both ends of the backward.
    labels = {label for label, _ in seen}
    assert {f"encoder {name}" for name, _ in encoder.named_parameters()} <= labels
    assert {"encoder begin backward", "encoder end backward"} <= labels or not pixels_need_grad


@in_one_rank
def test_each_backward_switches_once_to_and_fro() -> None:
    _, (encoder, after) = make_parts("encoder", "after")
    run_in_state(encoder, ENCODER)
    out = after(encoder(torch.randn(3, 4)))
    switches: list[tuple[str, str]] = []
    PARALLEL_STATES.on_switch = lambda *names: switches.append(names)
    out.sum().backward()
    PARALLEL_STATES.on_switch = None
    assert switches == [(DECODER, ENCODER), (ENCODER, DECODER)]


@in_one_rank
def test_a_frozen_module_has_no_backward_but_passes_gradients_on() -> None:
    seen, (before, encoder, after) = make_parts("before", "encoder", "after")
    encoder.requires_grad_(False)
    run_in_state(encoder, ENCODER)
    out = encoder(torch.randn(3, 4))
    assert not out.requires_grad
    after(out).sum().backward()
    assert not [label for label, _ in seen if "encoder" in label and "backward" in label]
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "after") == {DECODER}
    encoder(before(torch.randn(3, 4))).sum().backward()
    assert ("encoder begin backward", ENCODER) in seen
    assert states_of(seen, "before") == {DECODER}


class _Outer(nn.Module):
    def __init__(self, own: Part, inner: Part, last: Part) -> None:
        super().__init__()
        self.own, self.inner, self.last = own, inner, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.own(x)))


@in_one_rank
def test_modules_in_modules_and_one_after_another() -> None:
    seen, (own, inner, last, projector, after) = make_parts(
        "own", "inner", "last", "projector", "after"
    )
    outer = _Outer(own, inner, last)
    run_in_state(outer, ENCODER)
    run_in_state(inner, AUDIO)
    run_in_state(projector, AUDIO)
    after(projector(outer(torch.randn(3, 4)))).sum().backward()
    for label, state in {
        "own": ENCODER,
        "inner": AUDIO,
        "last": ENCODER,
        "projector": AUDIO,
        "after": DECODER,
    }.items():
        assert states_of(seen, label) == {state}, label


@pytest.mark.parametrize("order", [[1, 2, 0], "together", "twice"])
@in_one_rank
def test_microbatches_in_flight(order: Any) -> None:
    seen, (before, encoder, after) = make_parts("before", "encoder", "after")
    run_in_state(encoder, ENCODER)
    losses = [after(encoder(before(torch.randn(3, 4)))).sum() for _ in range(3)]
    if order == "together":
        torch.stack(losses).sum().backward()
    elif order == "twice":
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    else:
        for number in order:
            losses[number].backward()
            assert PARALLEL_STATES.current == DECODER
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "before") == states_of(seen, "after") == {DECODER}


@in_one_rank
def test_a_backward_begun_in_another_state_ends_in_it() -> None:
    seen, (encoder, after) = make_parts("encoder", "after")
    run_in_state(encoder, ENCODER)
    with parallel_state_of(ENCODER):
        loss = after(encoder(torch.randn(3, 4))).sum()
    with parallel_state_of(AUDIO):
        seen.clear()
        loss.backward()
        assert PARALLEL_STATES.current == AUDIO
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "after") == {AUDIO}


# Values


def _gradients(part: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    part.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = run(part)
    loss.backward()
    return [loss.detach(), *(p.grad for p in part.parameters() if p.grad is not None)]


class _Taps(nn.Module):
    """Outputs that are used inside as well, one of them several times; one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.unused = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = gelu(self.layers[0](x)) + x
        second = gelu(self.layers[1](first)) + first * first
        last = self.layers[3](gelu(self.layers[2](second)) + second + first)
        return {"taps": [first, second], "last": last, "unused": self.unused(first)}


def _use_taps(model: nn.Sequential) -> torch.Tensor:
    x = torch.randn(64, 64)
    x = model[0](x)
    out = model[1](x)
    first, second = out["taps"]
    y = model[2](out["last"]) + first
    y = y * second + gelu(first) + x
    return (y * first.sigmoid()).square().mean()


@in_one_rank
def test_gradients_are_bit_identical() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), _Taps(), nn.Linear(64, 64))
    plain = _gradients(model, _use_taps)
    run_in_state(model[1], ENCODER)
    run_in_state(model[1].layers[2], AUDIO)
    hooked = _gradients(model, _use_taps)
    assert len(plain) == len(hooked) == 1 + 12
    for one, other in zip(plain, hooked, strict=True):
        assert torch.equal(one, other)
    assert model[1].unused.weight.grad is None


class _Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None


@in_one_rank
def test_no_gradient_stays_none() -> None:
    _, (encoder,) = make_parts("encoder")
    encoder = encoder.first
    run_in_state(encoder, ENCODER)
    _Drops.apply(encoder(torch.randn(3, 4))).sum().backward()
    assert encoder.weight.grad is None


# Recomputation


class _Recomputes(Part):
    """Recomputes within the module."""

    def __init__(self, how: str, seen: list[tuple[str, str]]) -> None:
        super().__init__("encoder", seen, dropout=0.5)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _recompute(self.how, super().forward, x)


def _recompute(how: str, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if how == "megatron":
        return tensor_parallel.checkpoint(function, False, x)
    if how == "none":
        return function(x)
    # torch saves the default generator only: dropout by the tracker is Megatron's to recompute
    return torch_checkpoint(function, x, use_reentrant=how == "reentrant")


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("how", ["megatron", "reentrant", "not reentrant"])
@in_one_rank
def test_recomputation(how: str, where: str) -> None:
    seen, (before, encoder, after) = make_parts("before", "encoder", "after")
    if where == "inside":
        encoder = _Recomputes(how, seen)
        encoder.dropout = 0.0
    run_in_state(encoder, ENCODER)
    x = before(torch.randn(3, 4))
    out = encoder(x) if where == "inside" else _recompute(how, encoder, x)
    seen.clear()
    after(out).sum().backward()
    assert ("encoder middle forward", ENCODER) in seen  # it was recomputed
    assert ("encoder middle backward", ENCODER) in seen
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "before") == states_of(seen, "after") == {DECODER}


@in_one_rank
def test_recomputed_dropout_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    encoder = _Recomputes("none", [])
    run_in_state(encoder, ENCODER)
    x = torch.randn(8, 4, requires_grad=True)
    found = []
    with parallel_state_of(ENCODER):
        random = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    for how in ("none", "megatron"):
        with parallel_state_of(ENCODER):
            torch.set_rng_state(random[0])
            get_cuda_rng_tracker().set_states(dict(random[1]))
        encoder.how, x.grad = how, None
        encoder.zero_grad(set_to_none=True)
        loss = encoder(x).square().sum()
        # The decoder draws in between, and the encoder for its next microbatch.
        torch.rand(3)
        encoder(x)
        loss.backward()
        with parallel_state_of(ENCODER):
            after = torch.get_rng_state()
        found.append([x.grad, *(p.grad for p in encoder.parameters()), after])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# Exceptions


@in_one_rank
def test_an_exception_in_forward() -> None:
    _, (own, inner, last) = make_parts("own", "inner", "last")
    outer = _Outer(own, inner, last)
    run_in_state(outer, ENCODER)
    run_in_state(inner, AUDIO)
    inner.second = nn.Linear(5, 4)  # does not fit
    with pytest.raises(RuntimeError, match="shapes"):
        outer(torch.randn(3, 4))
    assert PARALLEL_STATES.current == DECODER
    inner.second = nn.Linear(4, 4)
    outer(torch.randn(3, 4)).sum().backward()


# Outputs


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


def _of_all_kinds(x: torch.Tensor) -> dict[str, Any]:
    pair = _Pair(x + 1, (2 * x, None, 3))
    return {"list": [x, pair], "features": _Features(x * x, {"deep": [x + 2]}), "again": x}


@in_one_rank
def test_outputs_of_all_kinds() -> None:
    module = _Returns(_of_all_kinds)
    plain = module(torch.ones(2, 4))
    run_in_state(module, ENCODER)
    seen: list[str] = []
    module.linear.weight.register_hook(lambda _: seen.append(PARALLEL_STATES.current))
    out = module(torch.ones(2, 4))
    assert out["again"] is out["list"][0]

    def tensors(out: dict[str, Any]) -> list[torch.Tensor]:
        first, (left, (right, *_)) = out["list"]
        return [first, left, right, out["features"].tensor, out["features"].others["deep"][0]]

    for one, other in zip(tensors(out), tensors(plain), strict=True):
        assert torch.equal(one, other)
        seen.clear()
        one.sum().backward(retain_graph=True)
        assert seen == [ENCODER]


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
    PARALLEL_STATES.switch(DECODER)  # as the failed backward has not


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
    activations.append(weakref.ref(out))
    out.sum().backward()
    del out
    module(torch.ones(2, 4))  # and without a backward
    assert [ref() for ref in activations] == [None] * 3
