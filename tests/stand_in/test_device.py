"""The device itself: the CPU's numbers, another device's rules."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks

from loongplug.models.layers import linear
from stand_in.device import enter
from stand_in.waits import Wait, counted


def on_device(check: Callable[[Any], Any]) -> Any:
    """What ``check(platform)`` gives in a rank of its own."""

    def rank(number: int) -> Any:
        return check(enter())

    (result,) = run_ranks(rank, 1, timeout=120.0)
    return result


def said(call: Callable[[], object]) -> str:
    """The first line of the error that it raises."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value).splitlines()[0]


OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((1, 4, 16, 32),) * 3,
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ((1, 4, 16, 32), (1, 2, 16, 32), (1, 2, 16, 32)),
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), ((4, 32), (32,), (32,))),
    "linear": (lambda x, w, b: F.linear(x, w, b), ((4, 5, 32), (8, 32), (8,))),
    "large linear": (linear.fast_linear, ((128, 2, 128), (256, 128), (256,))),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), ((4, 32),)),
    "index_put": (
        lambda x, f: x.index_put((torch.tensor([0, 2], device=x.device),), f),
        ((4, 8), (2, 8)),
    ),
    "split and cat": (lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), ((4, 8),)),
    "windows": (lambda x: x.unfold(0, 2, 1), ((4, 8),)),
    "in place on a view": (lambda x: (y := x.clone(), y[1:].add_(1), y)[-1], ((4, 8),)),
    "log softmax": (lambda x: x.log_softmax(-1), ((4, 9),)),
}


def test_operators_give_the_cpus_bits() -> None:
    def check(platform: Any) -> list[str]:
        different = []
        for name, (function, shapes) in OPERATORS.items():
            torch.manual_seed(0)
            given = [torch.randn(shape) for shape in shapes]  # leaves without a graph
            found = []
            for device in (torch.device("cpu"), platform.device):
                inputs = [each.clone().to(device).requires_grad_() for each in given]
                output = function(*inputs)
                output.pow(2).sum().backward()
                found.append([output, *(each.grad for each in inputs)])
            if not all(torch.equal(a, b.cpu()) for a, b in zip(*found, strict=True)):
                different.append(name)
        return different

    assert on_device(check) == []


def test_host_and_device_do_not_mix() -> None:
    def check(platform: Any) -> list[str]:
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        platform.extension.set_device(1)
        other = torch.ones(3, device="cuda")
        first = torch.zeros(1, dtype=torch.int64)
        told = [
            said(lambda: there + here),
            said(lambda: there + other),
            said(lambda: here[there]),
            said(lambda: there.index_put((first.cuda(0),), here[:1])),
            said(lambda: there.gather(0, first[0])),
        ]
        assert there[first].item() == 1  # indices are copied, and counted
        assert (there + torch.tensor(2.0)).sum().item() == 9  # a number is an argument
        assert there.is_cuda
        assert not here.is_cuda
        return told

    mixed, devices, index, values, number = on_device(check)
    assert "same device: aten::add met a tensor on the host" in mixed
    assert "same device: aten::add met devices 0 and 1" in devices
    assert index
    assert "same device: aten::_index_put_impl_ met a tensor on the host of [1]" in values
    assert "same device: aten::gather met a tensor on the host of []" in number


def test_a_wait_in_a_backward_of_torch_s_own_is_counted() -> None:
    """No function of Python's is on the stack of autograd's thread then."""

    def check(platform: Any) -> dict[Wait, int]:
        x = torch.ones(4, device="cuda", requires_grad=True)
        mask = torch.tensor([True, False, True, True]).cuda()
        loss = x[mask].sum()
        return counted(loss.backward, platform.extension)

    assert {wait.kind for wait in on_device(check)} == {"boolean index"}


def test_a_parameter_that_moves_is_the_same_one_and_keeps_what_its_gradient_goes_through() -> None:
    """As on CUDA; so a bias of keys, whose gradient is held at zero, stays where it is."""

    def check(platform: Any) -> tuple[str, list[float]]:
        layer = torch.nn.Linear(2, 2)
        bias = layer.bias
        bias.register_hook(lambda gradient: gradient * torch.tensor([0.0, 1.0]).cuda())
        layer.cuda()
        assert layer.bias is bias
        layer(torch.ones(1, 2).cuda()).sum().backward()
        assert bias.grad is not None
        return bias.device.type, bias.grad.cpu().tolist()

    assert on_device(check) == ("stand_in", [0.0, 1.0])


def test_waits_of_the_host_are_counted() -> None:
    def check(platform: Any) -> dict[str, int]:
        x = torch.arange(4.0, device="cuda")
        pinned = torch.ones(4, pin_memory=True)
        platform.extension.waits()
        pinned.to("cuda", non_blocking=True)  # waits for nothing
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        (x * 2).sum().add_(1)
        x[x < 0] = 0.0  # by the mask
        assert platform.extension.waits() == {}
        x.sum().item()
        x.nonzero()
        x[x > 1]
        torch.ones(4).to("cuda", non_blocking=True)
        pinned.to("cuda")
        torch.cuda.synchronize()
        counts: dict[str, int] = platform.extension.waits()
        return counts

    assert on_device(check) == {
        "item": 1,
        "nonzero": 1,
        "boolean index": 1,
        "copy from pageable memory": 1,
        "copy from the host": 1,
        "synchronize": 1,
    }


def test_first_backwards_of_forked_ranks() -> None:
    """Each starts a thread for every device; one fork in two ended when they made one pool."""

    def check(platform: Any) -> None:
        torch.ones(4, device="cuda", requires_grad=True).sum().backward()

    for _ in range(8):
        on_device(check)


@pytest.mark.parametrize(
    "file", ["hetero/test_executor", "hetero/test_encoder_state", "platform/test_devices"]
)
def test_what_is_marked_gpu_runs_on_it(file: str) -> None:
    """These have a body that a GPU's interpreter calls by its name."""

    def check(platform: Any) -> None:
        path = Path(__file__).parents[1] / file
        sys.path.insert(0, str(path.parent))
        # The import goes backward, too.
        importlib.import_module(path.name).travels_on_a_gpu()

    on_device(check)


def test_a_copy_beside_the_computation_is_late_and_has_to_be_waited_for() -> None:
    def check(platform: Any) -> list[str]:
        x = torch.ones(8, device="cuda")
        host = torch.zeros(8, pin_memory=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            early = said(lambda: host.copy_(x, non_blocking=True))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        assert host.isnan().all()
        overwritten = said(lambda: x.add_(1))
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(host, torch.ones(8))
        x.add_(1)
        back = torch.empty(8, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            back.copy_(host, non_blocking=True)
        unwaited = said(lambda: back + 1)
        torch.cuda.current_stream().wait_stream(stream)
        assert (back + 1).sum().item() == 16
        return [early, overwritten, unwaited]

    early, overwritten, unwaited = on_device(check)
    assert early.startswith("copy reads on stream 8 what aten::fill_ writes on stream 0")
    assert overwritten.startswith("aten::add_ writes on stream 0 what copy reads on stream 8")
    assert unwaited.startswith("aten::add reads on stream 0 what copy writes on stream 8")


def test_memory_that_a_late_copy_reads_must_not_be_given_away() -> None:
    def check(platform: Any) -> tuple[str, bool]:
        def leave(*, recorded: bool) -> torch.Tensor:
            x = torch.ones(64, device="cuda")
            host = torch.zeros(64, pin_memory=True)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host.copy_(x, non_blocking=True)
            if recorded:
                x.record_stream(stream)
            del x
            torch.ones(64, device="cuda")
            torch.cuda.synchronize()
            return host

        told = said(lambda: leave(recorded=False))
        torch.cuda.synchronize()
        return told, bool((leave(recorded=True) == 1).all())

    told, whole = on_device(check)
    assert told.startswith("memory of 256 bytes was freed while copy on stream 8 reads it")
    assert whole


def test_a_stream_of_another_device_is_refused() -> None:
    def check(platform: Any) -> str:
        stream = torch.cuda.Stream()
        platform.extension.set_device(1)
        return said(lambda: torch.cuda.stream(stream).__enter__())

    assert "a stream of stand_in:0 where stand_in:1" in on_device(check)


def collectives(rank: int) -> list[str]:
    platform = enter()
    platform.extension.set_device(rank)
    group = dist.new_group(backend="nccl")
    told = [said(lambda: dist.all_reduce(torch.ones(4), group=group))]
    x = torch.full((4,), rank + 1.0, device="cuda")
    work = dist.all_reduce(x, group=group, async_op=True)
    told.append(said(lambda: x + 1))
    work.wait()
    assert x.tolist() == [3.0] * 4
    pieces = torch.empty(2, device="cuda")
    dist.all_to_all_single(pieces, x[:2].clone(), group=group)
    dist.all_gather_into_tensor(x, pieces, group=group)
    assert x.tolist() == [3.0] * 4
    return told


def test_collectives_refuse_the_hosts_tensors_and_are_late() -> None:
    for host, late in run_ranks(collectives, 2, timeout=120.0):
        assert host == "No backend type associated with device type cpu"
        assert "add reads on stream" in late
