"""A module runs in its state: forward, backward and recomputation, whatever surrounds it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from state_parts import Part, make_parts, states_of
from state_ranks import AUDIO, DECODER, ENCODER, in_one_rank
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from loongplug.parallel.hooks import run_in_state
from loongplug.parallel.states import (
    PARALLEL_STATES,
    parallel_state_of,
)


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
def test_a_frozen_module_has_no_backward() -> None:
    seen, (encoder, after) = make_parts("encoder", "after")
    encoder.requires_grad_(False)
    run_in_state(encoder, ENCODER)
    out = encoder(torch.randn(3, 4))
    assert not out.requires_grad
    after(out).sum().backward()
    assert not [label for label, _ in seen if "encoder" in label and "backward" in label]
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "after") == {DECODER}


@in_one_rank
def test_a_frozen_module_passes_gradients_on() -> None:
    seen, (before, encoder) = make_parts("before", "encoder")
    encoder.requires_grad_(False)
    run_in_state(encoder, ENCODER)
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


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise ValueError(f"failed in {PARALLEL_STATES.current}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("where", "state"),
    [
        ("after", DECODER),
        ("inner", AUDIO),
        ("own", ENCODER),
    ],
)
@in_one_rank
def test_an_exception_in_backward(where: str, state: str, reentrant: bool) -> None:
    seen, parts = make_parts("before", "own", "inner", "last", "after")
    before, own, inner, last, after = parts
    outer = _Outer(own, inner, last)
    run_in_state(outer, ENCODER)
    run_in_state(inner, AUDIO)

    def model(x: torch.Tensor) -> torch.Tensor:
        return after(outer(before(x)))

    (failing,) = (part for part in parts if part.label == where)
    handle = failing.second.register_forward_hook(lambda *hooked: _Fails.apply(hooked[2]))
    x = torch.randn(3, 4, requires_grad=True)
    loss = torch_checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
    with pytest.raises(ValueError, match=f"failed in {state}"):
        loss.sum().backward()
    assert PARALLEL_STATES.current == DECODER
    assert not PARALLEL_STATES.backwards
    # and it still works
    handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert states_of(seen, "inner") == {AUDIO}
    assert states_of(seen, "after") == states_of(seen, "before") == {DECODER}


@in_one_rank
def test_a_backward_for_some_gradients_only() -> None:
    seen, (before, encoder) = make_parts("before", "encoder")
    run_in_state(encoder, ENCODER)
    x = before(torch.randn(3, 4))
    (gradient,) = torch.autograd.grad(encoder(x).sum(), [encoder.first.weight])
    assert gradient.shape == (4, 4)
    assert ("encoder middle backward", ENCODER) in seen
    assert PARALLEL_STATES.current == DECODER
    # The next one enters again.
    seen.clear()
    encoder(before(torch.randn(3, 4))).sum().backward()
    assert states_of(seen, "encoder") == {ENCODER}
    assert states_of(seen, "before") == {DECODER}
