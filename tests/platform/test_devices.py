"""How tensors leave the host; no GPU is needed to tell."""

from typing import Any

import pytest
import torch
from on_a_gpu import in_fresh_interpreter

from loongplug.platform import current_platform
from loongplug.platform.devices import to_device

pytestmark = pytest.mark.quick


class Sent(torch.Tensor):
    """Notes what is asked of it."""

    calls: list[Any]

    @staticmethod
    def __new__(cls) -> "Sent":
        made = torch.zeros(3).as_subclass(cls)
        made.calls = []
        return made

    def pin_memory(self, *_: Any) -> "Sent":
        self.calls.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Sent":  # type: ignore[override]
        self.calls.append((str(device), non_blocking))
        return self


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("xpu")])
def test_copies_to_a_device_come_from_pinned_memory(device: Any) -> None:
    sent = Sent()
    to_device(sent, device)
    assert sent.calls == ["pinned", (str(device), True)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_pinned_where_nothing_is_copied(device: str) -> None:
    sent = Sent()
    to_device(sent, device)
    assert sent.calls == [(device, True)]
    assert to_device(torch.zeros(2), device).device.type == device


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    in_fresh_interpreter(__file__, "travels_on_a_gpu")


def travels_on_a_gpu() -> None:
    """The host waits for no copy, and may write over what it has sent."""
    device = current_platform().device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    sent = []
    for number in range(20):
        tensor = torch.full((1000, 100), float(number))
        sent.append(to_device(tensor, device))
        tensor.fill_(-1.0)
    torch.cuda.set_sync_debug_mode("default")
    assert all(each.device == device for each in sent)
    assert [each.unique().tolist() for each in sent] == [[number] for number in range(20)]
