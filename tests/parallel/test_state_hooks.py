"""A module runs in its state: forward, backward and recomputation, whatever surrounds it."""

import copy
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from ranks import run_ranks
from state_ranks import DECODER, ENCODER, decoder_and_encoder
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from loongplug.parallel.hooks import run_in_state
from loongplug.parallel.layout import Layout
from loongplug.parallel.states import (
    PARALLEL_STATES,
    create_parallel_state,
    current_parallel_state,
    parallel_state_of,
)

AUDIO = "audio_encoder"


def in_one_rank(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a forked rank that has three states."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        run_ranks(_with_states, 1, test=functools.partial(test, **parameters))

    return run


def _with_states(rank: int, test: Callable[[], None]) -> None:
    with decoder_and_encoder():
        create_parallel_state(AUDIO, Layout(), seed=1)
        test()
        assert current_parallel_state() == DECODER
        assert not PARALLEL_STATES.backwards


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, label: str, seen: list[tuple[str, str]]) -> torch.Tensor:
        ctx.label, ctx.seen = label, seen
        seen.append((f"{label} forward", current_parallel_state()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.append((f"{ctx.label} backward", current_parallel_state()))
        return grads[0], None, None


class _Part(nn.Module):
    """Something with weights that notes the state of every node that it can reach."""

    def __init__(self, label: str, seen: list[tuple[str, str]], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.label, self.seen, self.dropout = label, seen, dropout
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: seen.append((f"{label} {name}", current_parallel_state()))
            )

    def probe(self, x: torch.Tensor, where: str) -> torch.Tensor:
        return _Probe.apply(x, f"{self.label} {where}", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.probe(self.first(self.probe(x, "begin")), "middle")
        if self.dropout:
            with get_cuda_rng_tracker().fork():
                x = torch.dropout(x, self.dropout, True)
            x = torch.dropout(x, self.dropout, True)
        return self.probe(self.second(gelu(x)), "end")


def _states(seen: list[tuple[str, str]], label: str) -> set[str]:
    states = {state for each, state in seen if each.startswith(label)}
    assert states, label
    return states


def _parts(*labels: str) -> tuple[list[tuple[str, str]], list[_Part]]:
    torch.manual_seed(0)
    seen: list[tuple[str, str]] = []
    return seen, [_Part(label, seen) for label in labels]


@pytest.mark.parametrize("pixels_need_grad", [False, True])
@in_one_rank
def test_forward_and_backward(pixels_need_grad: bool) -> None:
    seen, (before, encoder, after) = _parts("before", "encoder", "after")
    run_in_state(encoder, ENCODER)
    pixels = torch.randn(3, 4)
    if pixels_need_grad:
        pixels = before(pixels)
    out = encoder(pixels)
    assert current_parallel_state() == DECODER
    after(out).sum().backward()
    assert current_parallel_state() == DECODER
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "after") == {DECODER}
    if pixels_need_grad:
        assert _states(seen, "before") == {DECODER}
    # Every weight was seen, and both ends of the backward.
    labels = {label for label, _ in seen}
    assert {f"encoder {name}" for name, _ in encoder.named_parameters()} <= labels
    assert {"encoder begin backward", "encoder end backward"} <= labels or not pixels_need_grad


@in_one_rank
def test_each_backward_switches_once_to_and_fro() -> None:
    _, (encoder, after) = _parts("encoder", "after")
    run_in_state(encoder, ENCODER)
    out = after(encoder(torch.randn(3, 4)))
    switches: list[tuple[str, str]] = []
    PARALLEL_STATES.on_switch = lambda *names: switches.append(names)
    out.sum().backward()
    PARALLEL_STATES.on_switch = None
    assert switches == [(DECODER, ENCODER), (ENCODER, DECODER)]


@in_one_rank
def test_ids_as_inputs() -> None:
    embedding, seen = nn.Embedding(5, 4), []
    embedding.weight.register_hook(lambda _: seen.append(current_parallel_state()))
    run_in_state(embedding, ENCODER)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert seen == [ENCODER]


@in_one_rank
def test_a_frozen_module_has_no_backward() -> None:
    seen, (encoder, after) = _parts("encoder", "after")
    encoder.requires_grad_(False)
    run_in_state(encoder, ENCODER)
    out = encoder(torch.randn(3, 4))
    assert not out.requires_grad
    after(out).sum().backward()
    assert not [label for label, _ in seen if "encoder" in label and "backward" in label]
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "after") == {DECODER}


@in_one_rank
def test_a_frozen_module_passes_gradients_on() -> None:
    seen, (before, encoder) = _parts("before", "encoder")
    encoder.requires_grad_(False)
    run_in_state(encoder, ENCODER)
    encoder(before(torch.randn(3, 4))).sum().backward()
    assert ("encoder begin backward", ENCODER) in seen
    assert _states(seen, "before") == {DECODER}


class _Outer(nn.Module):
    def __init__(self, own: _Part, inner: _Part, last: _Part) -> None:
        super().__init__()
        self.own, self.inner, self.last = own, inner, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.own(x)))


@in_one_rank
def test_modules_in_modules_and_one_after_another() -> None:
    seen, (own, inner, last, projector, after) = _parts(
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
        assert _states(seen, label) == {state}, label


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], "together", "twice"])
@in_one_rank
def test_microbatches_in_flight(order: Any) -> None:
    seen, (before, encoder, after) = _parts("before", "encoder", "after")
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
            assert current_parallel_state() == DECODER
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "before") == _states(seen, "after") == {DECODER}


@in_one_rank
def test_a_backward_begun_in_another_state_ends_in_it() -> None:
    seen, (encoder, after) = _parts("encoder", "after")
    run_in_state(encoder, ENCODER)
    with parallel_state_of(ENCODER):
        loss = after(encoder(torch.randn(3, 4))).sum()
    with parallel_state_of(AUDIO):
        seen.clear()
        loss.backward()
        assert current_parallel_state() == AUDIO
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "after") == {AUDIO}


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


# Recomputation


class _Recomputes(_Part):
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
    seen, (before, encoder, after) = _parts("before", "encoder", "after")
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
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "before") == _states(seen, "after") == {DECODER}


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
    _, (own, inner, last) = _parts("own", "inner", "last")
    outer = _Outer(own, inner, last)
    run_in_state(outer, ENCODER)
    run_in_state(inner, AUDIO)
    inner.second = nn.Linear(5, 4)  # does not fit
    with pytest.raises(RuntimeError, match="shapes"):
        outer(torch.randn(3, 4))
    assert current_parallel_state() == DECODER
    inner.second = nn.Linear(4, 4)
    outer(torch.randn(3, 4)).sum().backward()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise ValueError(f"failed in {current_parallel_state()}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("where", "state"),
    [
        ("after", DECODER),
        ("last", ENCODER),
        ("inner", AUDIO),
        ("own", ENCODER),
        ("before", DECODER),
    ],
)
@in_one_rank
def test_an_exception_in_backward(where: str, state: str, reentrant: bool) -> None:
    seen, parts = _parts("before", "own", "inner", "last", "after")
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
    assert current_parallel_state() == DECODER
    assert not PARALLEL_STATES.backwards
    # and it still works
    handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert _states(seen, "inner") == {AUDIO}
    assert _states(seen, "after") == _states(seen, "before") == {DECODER}


@in_one_rank
def test_a_backward_for_some_gradients_only() -> None:
    seen, (before, encoder) = _parts("before", "encoder")
    run_in_state(encoder, ENCODER)
    x = before(torch.randn(3, 4))
    (gradient,) = torch.autograd.grad(encoder(x).sum(), [encoder.first.weight])
    assert gradient.shape == (4, 4)
    assert ("encoder middle backward", ENCODER) in seen
    assert current_parallel_state() == DECODER
    # The next one enters anew.
    seen.clear()
    encoder(before(torch.randn(3, 4))).sum().backward()
    assert _states(seen, "encoder") == {ENCODER}
    assert _states(seen, "before") == {DECODER}


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
    module.linear.weight.register_hook(lambda _: seen.append(current_parallel_state()))
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
    seen, (encoder,) = _parts("encoder")
    hooks = run_in_state(encoder, ENCODER)
    hooks.remove()
    encoder(torch.randn(3, 4)).sum().backward()
    assert _states(seen, "encoder") == {DECODER}
    run_in_state(encoder, ENCODER)


@in_one_rank
def test_a_copy_runs_in_the_state_too() -> None:
    module = _Returns(lambda x: x)
    run_in_state(module, ENCODER)
    module(torch.ones(2, 4))
    other = copy.deepcopy(module)
    seen: list[str] = []
    other.linear.weight.register_hook(lambda _: seen.append(current_parallel_state()))
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
        assert current_parallel_state() == DECODER
    module(torch.ones(2)).sum().backward()


def test_parametrized_tests_get_their_parameters() -> None:
    assert list(inspect.signature(test_recomputation).parameters) == ["how", "where"]
