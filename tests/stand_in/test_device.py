"""The device itself: waits that it counts, and what it refuses beside whole runs' faults."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

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
        return platform.extension.waits()

    assert on_device(check) == {
        "item": 1,
        "nonzero": 1,
        "boolean index": 1,
        "copy from pageable memory": 1,
        "copy from the host": 1,
        "synchronize": 1,
    }


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
