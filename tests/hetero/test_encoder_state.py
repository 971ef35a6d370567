"""What leaves for the host and comes back: an encoder's state, and what its backward needs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_copies import LazyCopies
from on_a_gpu import in_fresh_interpreter
from torch import Tensor, nn
from toy_step import CPU, Device

from loongplug.hetero import encoder_state
from loongplug.hetero.encoder_state import EncoderState, addresses, movable_saves
from loongplug.platform import current_platform
from loongplug.platform.platforms import Platform
from loongplug.platform.prefetch import Copies, Movable, PrefetchQueue

pytestmark = pytest.mark.quick


class Freeing(Device):
    """What CUDA's platform does to storages, on the host."""

    def release(self, storage: torch.UntypedStorage) -> None:
        self.away += storage.nbytes()
        Platform.release(self, storage)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.away -= nbytes
        Platform.restore(self, storage, nbytes)


class Part:
    """Megatron's wrapper and optimizer, as far as they hold memory; after a step.

    Trainable parameters are views of one flat buffer, as are their gradients; one is frozen. The
    optimizer has fp32 shards and two moments of each, and one optimizer holds nothing.
    """

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        self.module[0].bias.requires_grad_(False)
        trained = [each for each in self.module.parameters() if each.requires_grad]
        size = sum(each.numel() for each in trained)
        self.flat, self.grad = torch.randn(size), torch.zeros(size)
        start = 0
        for each in trained:
            end = start + each.numel()
            each.data = self.flat[start:end].view(each.shape)
            each.main_grad = self.grad[start:end].view(each.shape)
            start = end
        buffer = SimpleNamespace(param_data=self.flat, grad_data=self.grad, extra_main_grads=[])
        self.buffers, self.expert_parallel_buffers = [buffer], []
        self.bucket_groups = [SimpleNamespace(param_gather_handle=None)]
        self.expert_parallel_bucket_groups: list[Any] = []
        shard = torch.randn(size // 2)
        state = {"exp_avg": torch.randn(size // 2), "exp_avg_sq": torch.rand(size // 2), "step": 3}
        inner = SimpleNamespace(param_groups=[{"params": [shard]}], state={shard: state})
        self.optimizers = [SimpleNamespace(optimizer=inner), SimpleNamespace(optimizer=None)]
        self.values = [*self.module.parameters(), shard, state["exp_avg"], state["exp_avg_sq"]]
        self.nbytes = 4 * (4 * size // 2 + 2 * size + 4) - 4 * size // 2  # shard, moments, flats

    def copy(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.values]


@pytest.mark.parametrize("platform", [Device, Freeing])
@pytest.mark.parametrize("copies", [LazyCopies, Copies])
def test_all_of_it_goes_and_comes_back_as_it_was(platform, copies):
    part = Part()
    device = platform(copies())
    state = EncoderState(part, part.optimizers, platform=device)
    queue, hosts = PrefetchQueue(device.copies()), []
    for step in range(3):
        before = part.copy()
        movable = state.movable()
        queue.leave({"state": movable})
        hosts.append([each.host.data_ptr() for each in movable if not each.zeros])
        queue.let_go("state")
        assert device.away == part.nbytes
        if platform is Device:
            assert all(each.isnan().all() for each in part.values)
            assert all(each.main_grad.isnan().all() for each in part.module.parameters()
                       if each.requires_grad)  # fmt: skip
        queue.send_for("state")
        queue.take("state")
        assert device.away == 0
        for value, was in zip(part.values, before, strict=True):
            assert torch.equal(value, was)
        assert not part.grad.any()
        # Views are views still: a step changes what they look at.
        part.flat += step + 1
        for value, was in zip(part.module.parameters(), before, strict=False):
            assert torch.equal(value, was + step + 1) == value.requires_grad
        part.module[1].bias.main_grad += 1
        assert part.grad.sum() == 2
        part.grad.zero_()
    assert hosts[0] == hosts[1] == hosts[2]  # memory on the host is made once


def away_and_back(state: EncoderState, device: Device) -> int:
    """Bytes that were copied to the host."""
    queue, movable = PrefetchQueue(device.copies()), state.movable()
    queue.leave({"state": movable})
    queue.let_go("state")
    queue.send_for("state")
    queue.take("state")
    return sum(each.device.nbytes for each in movable if not (each.zeros or each.unchanged))


@pytest.mark.parametrize("platform", [Device, Freeing])
def test_frozen_weights_are_copied_to_the_host_once(platform):
    part = Part()
    device = platform(Copies())
    state = EncoderState(part, part.optimizers, platform=device)
    frozen = part.module[0].bias
    state.movable()  # asked for, but it did not leave
    first = away_and_back(state, device)
    before = part.copy()
    assert away_and_back(state, device) == first - frozen.nbytes
    assert all(map(torch.equal, part.copy(), before))
    frozen.requires_grad_(True)  # it trains from now on, written to by whatever holds it
    frozen.data += 1
    assert away_and_back(state, device) == first
    assert torch.equal(frozen, before[1] + 1)


@pytest.mark.gpu
def test_on_a_gpu():
    in_fresh_interpreter(__file__, "travels_on_a_gpu")


def travels_on_a_gpu():
    weight = torch.randn(1 << 24, device="cuda")
    was = weight.cpu()
    part = SimpleNamespace(
        module=nn.ParameterList([nn.Parameter(weight)]),
        buffers=[],
        expert_parallel_buffers=[],
        bucket_groups=[],
        expert_parallel_bucket_groups=[],
    )
    state = EncoderState(part, [], platform=current_platform())
    queue = PrefetchQueue(current_platform().copies())
    there = torch.cuda.memory_allocated()
    for _ in range(2):
        queue.leave({"state": state.movable()})
        queue.let_go("state")
        assert there - torch.cuda.memory_allocated() == weight.nbytes
        queue.send_for("state")
        queue.take("state")
        assert torch.equal(weight.cpu(), was)


ROWS = [40, 7, 25, 33]


class Encoder(nn.Module):
    """Saves views of one storage, a result, an input and weights of any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patches = nn.Linear(16, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.patches(pixels)
        query, key, value = self.qkv(hidden).chunk(3, dim=1)
        return torch.tanh(self.out((query * key).softmax(dim=1) * value)) + hidden


def pixels(unit: int) -> Tensor:
    return torch.randn(ROWS[unit], 16, generator=torch.Generator().manual_seed(unit))


def encoded(encoder: Encoder, unit: int) -> tuple[Tensor, list[Movable]]:
    stays = addresses(encoder.parameters())
    with movable_saves(device=CPU, stays=stays) as saved:
        output = encoder(pixels(unit))
    return output, list(saved.values())


@pytest.mark.parametrize("small", [1, 64 * 40 + 1])
def test_each_storage_is_saved_once_and_what_stays_is_not(monkeypatch, small):
    """However many views of it were saved: not weights, not inputs that stay, not what is small."""
    monkeypatch.setattr(encoder_state, "_SMALL", small)
    encoder, given = Encoder(), pixels(0)
    inputs = addresses([given])
    weights = addresses(encoder.parameters())
    with movable_saves(device=CPU, stays=weights) as saved:
        torch.autograd.graph.get_gradient_edge(encoder(given))
    # Of [rows, 16] each: pixels, patches, softmax, the product behind it, tanh; qkv is of three.
    one = 16 * 4 * ROWS[0]
    expected = [one] * 5 + [3 * one] if small == 1 else [3 * one]
    assert sorted(each.device.nbytes for each in saved.values()) == expected
    assert not weights & saved.keys()
    assert (inputs <= saved.keys()) == (small == 1)
    with movable_saves(device=CPU, stays=weights | inputs) as fewer:
        torch.autograd.graph.get_gradient_edge(encoder(given))
    assert not inputs & fewer.keys()
    assert len(fewer) == len(saved) - (small == 1)


def test_a_unit_that_was_not_sent_for_is_refused():
    encoder, queue = Encoder(), PrefetchQueue(Copies())
    output, saved = encoded(encoder, 0)
    queue.leave({0: saved})
    queue.let_go(0)
    with pytest.raises(AssertionError, match="was not sent for"):
        output.sum().backward()
