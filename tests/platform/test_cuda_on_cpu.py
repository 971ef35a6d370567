"""The CPU table against the installed torch, row by row, and what its rows have to do."""

import importlib
import platform
import resource
from typing import Any

import pytest
import torch

from loongplug.platform import current_platform
from loongplug.platform.cuda_on_cpu import CPU_ROWS, HostStream
from loongplug.platform.replacements import Replacement, ReplacementTable, resolve

pytestmark = pytest.mark.quick


def _value(row: Replacement) -> Any:
    return resolve(Replacement(target=row.target, reason=row.reason))[2]


@pytest.fixture
def originals() -> Any:
    """Each target's value without the table; the table is applied again afterwards."""
    table: ReplacementTable = current_platform()._tables["cpu"]  # type: ignore[attr-defined]
    table.undo()
    found = {row.target: _value(row) for row in CPU_ROWS}
    table.apply()
    return found


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
@pytest.mark.parametrize("name", ["tensor", "empty", "zeros", "ones", "rand"])
def test_factories_answer_cuda_with_the_host(name: str, device: Any) -> None:
    argument = [1.0, 2.0] if name == "tensor" else 2
    made = getattr(torch, name)(argument, device=device, pin_memory=True)
    assert made.device.type == "cpu"
    assert made.shape == (2,)


def test_factories_still_do_what_they_did() -> None:
    assert torch.zeros(2, dtype=torch.int8, device="meta").device.type == "meta"
    assert torch.zeros((2, 3)).shape == (2, 3)
    assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16), device="cuda").dtype == (
        torch.bfloat16
    )
    out = torch.empty(3)
    assert torch.ones(3, out=out) is out


def test_tensors_are_where_they_belong() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert leaf.cuda() is leaf
    assert leaf.cuda(torch.cuda.current_device(), non_blocking=True) is leaf
    assert leaf.pin_memory() is leaf
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert module.cuda(torch.cuda.current_device()).weight is weight
    leaf.record_stream(torch.cuda.current_stream())


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.float16, "torch.cuda.HalfTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
    ],
)
def test_type_names_are_those_the_optimizers_know(dtype: torch.dtype, name: str) -> None:
    assert torch.nn.Parameter(torch.ones(1, dtype=dtype)).type() == name
    assert torch.ones(1, dtype=dtype).type(torch.float64).dtype == torch.float64
    assert torch.ones(1, dtype=dtype).type("torch.DoubleTensor").dtype == torch.float64


def test_rng_state_is_the_hosts() -> None:
    from megatron.core.tensor_parallel import random as tracked

    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    tracked._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(tracked._get_cuda_rng_state(), torch.get_rng_state())


def test_streams_are_one_queue() -> None:
    stream = torch.cuda.Stream(device="cuda", priority=torch.cuda.Stream.priority_range()[1])
    assert isinstance(stream, HostStream)
    assert stream == torch.cuda.current_stream() == torch.cuda.default_stream()
    assert stream != 1
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event = stream.record_event()
    stream.wait_event(event)
    assert event.query()


def test_peak_memory_rises_and_is_reset() -> None:
    platform = current_platform()
    platform.reset_peak_memory()
    low = platform.peak_memory_bytes()
    block = torch.ones(50_000_000)  # 200 MB
    high = platform.peak_memory_bytes()
    assert 190e6 < high - low < 300e6
    del block
    assert platform.peak_memory_bytes() > high - 1e6  # the kernel's counts are not exact
    platform.reset_peak_memory()
    assert platform.peak_memory_bytes() < high - 150e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own settings")
@pytest.mark.parametrize("mib", [4, 20])
def test_what_a_step_frees_is_there_for_the_next_one(mib: int) -> None:
    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for each in [torch.ones(mib << 18) for _ in range(4)]:
            each.add_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # The first ones may still make room in a heap that other tests have used.
    assert min(faults_of_a_step() for _ in range(10)) < mib << 6  # a quarter of a tensor's pages


PLAIN = {"weight_decay": 0.1, "betas": (0.8, 0.95), "maximize": True}


def _adam_steps(*, at_ease: bool = True, **settings: Any) -> list[torch.Tensor]:
    """Parameters and second moments behind five steps; with ``at_ease`` all are contiguous."""
    generator = torch.Generator().manual_seed(0)
    parameters = [0.02 * torch.randn(n, generator=generator) for n in (10_003, 64, 1, 0)]
    if not at_ease:
        parameters.append(torch.randn(7, 5, generator=generator).t())
    adam = torch.optim.AdamW(parameters, lr=0.01, **settings)
    for _ in range(5):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator)
        adam.step()
    return [*parameters, *(adam.state[each]["exp_avg_sq"] for each in parameters)]


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({}, False),
        (PLAIN, False),
        ({"amsgrad": True}, True),
        ({"at_ease": False}, True),
    ],
    ids=str,
)
def test_adams_steps_are_those_of_torch(
    settings: dict[str, Any], exact: bool, originals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _adam_steps(**settings)
    monkeypatch.setattr(
        importlib.import_module("torch.optim.adam"),
        "_single_tensor_adam",
        originals["torch.optim.adam._single_tensor_adam"],
    )
    limit = 0.0 if exact else 1e-6
    for ours, theirs in zip(found, _adam_steps(**settings), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit / 10)
