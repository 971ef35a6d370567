"""The encoder's state leaves and comes back: bytes, views, order, and every wait is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_copies import LazyCopies
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from on_a_gpu import in_fresh_interpreter
from torch import Tensor, nn

from loongplug.hetero.encoder_state import EncoderState, StateAway
from loongplug.platform import current_platform
from loongplug.platform.copies import CudaCopies, HostCopies
from loongplug.platform.cpu import CpuPlatform
from loongplug.platform.cuda import CudaPlatform

pytestmark = pytest.mark.quick


class Device:
    """The host as a device whose memory is counted; what has been released is poison."""

    device = torch.device("cpu")

    def __init__(self, copies: Any) -> None:
        self.copies = lambda: copies
        self.away = 0

    def release(self, storage: torch.UntypedStorage) -> None:
        self.away += storage.nbytes()
        CpuPlatform.release(self, storage)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.away -= nbytes
        CpuPlatform.restore(self, storage, nbytes)


class Freeing(Device):
    """What CUDA's platform does to storages, on the host."""

    def release(self, storage: torch.UntypedStorage) -> None:
        self.away += storage.nbytes()
        CudaPlatform.release(self, storage)

    def restore(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.away -= nbytes
        CudaPlatform.restore(self, storage, nbytes)


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


def cycle(part: Part, device: Device) -> None:
    state = EncoderState(part, part.optimizers, platform=device)
    state.leave()
    state.let_go()
    state.send_for()
    state.back()


@pytest.mark.parametrize("platform", [Device, Freeing])
@pytest.mark.parametrize("copies", [LazyCopies, HostCopies, CudaCopies])
def test_all_of_it_goes_and_comes_back_as_it_was(platform, copies):
    part = Part()
    device = platform(copies())
    state = EncoderState(part, part.optimizers, platform=device)
    for step in range(3):
        before = part.copy()
        state.leave()
        state.let_go()
        assert device.away == part.nbytes
        if platform is Device:
            assert all(each.isnan().all() for each in part.values)
            assert all(each.main_grad.isnan().all() for each in part.module.parameters()
                       if each.requires_grad)  # fmt: skip
        state.send_for()
        state.back()
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


def waits() -> int:
    copies = LazyCopies()
    cycle(Part(), Device(copies))
    return copies.waits


@pytest.mark.parametrize("forgotten", range(waits()))
def test_without_any_of_its_waits_it_is_wrong(forgotten):
    part = Part()
    before = part.copy()
    cycle(part, Device(LazyCopies(forgotten=forgotten)))
    equal = [torch.equal(now, was) for now, was in zip(part.values, before, strict=True)]
    assert not all(equal)


def test_what_has_not_left_needs_no_way_back():
    part, copies = Part(), LazyCopies()
    device = Device(copies)
    state = EncoderState(part, part.optimizers, platform=device)
    before = part.copy()
    state.leave()
    state.back()
    assert device.away == 0
    assert all(torch.equal(now, was) for now, was in zip(part.values, before, strict=True))
    state.let_go()
    state.send_for()
    state.back()
    assert device.away == 0


class Inner:
    """A timing that does nothing."""

    def begin(self, *_: Any, **__: Any) -> None:
        pass

    def end(self) -> None:
        pass


class Plan(AbstractSchedulePlan):
    """What a schedule that overlaps is given in an output's place."""

    def on_backward(self, call: Any) -> None:
        self.backward = call

    @classmethod
    def run(cls, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def events(
    schedule: str, *, beside: bool, training: bool = True, chunks: int = 1, plans: bool = False
) -> str:
    """How many bytes are away, as . (none) or # (all), before each of the steps F and B.

    With ``plans``, forward steps give these, as with the experts' exchange overlapped.
    """
    part = Part()
    device = Device(HostCopies())
    timing = StateAway(Inner(), platform=device, beside=beside)
    timing.built(part, part.optimizers)
    seen = []

    def look() -> None:
        seen.append({0: ".", part.nbytes: "#"}[device.away])

    def forward_step(*_: Any) -> tuple[Tensor | Plan, None]:
        look()
        if plans:
            return Plan(), None
        return torch.ones(1, requires_grad=training) * 2, None

    def runs(*, forward_step_func: Any, num_microbatches: int, model: Any) -> None:
        outputs = []
        for step in schedule:
            if step == "F":
                outputs.append(forward_step_func()[0])
            else:
                outputs.pop(0).backward()
                look()

    number = schedule.count("F") // chunks
    timing.begin(None, (None,) * number, training=training)
    timing.around(runs)(
        forward_step_func=forward_step, num_microbatches=number, model=[None] * chunks
    )
    timing.end()
    look()
    return "".join(seen)


def test_it_is_away_between_the_second_forward_and_the_last_backward():
    assert events("FFFBFBBB", beside=True, chunks=2) == ".######.."
    assert events("FFBB", beside=True) == ".##.."
    assert events("FFFBFBBB", beside=True, chunks=2, plans=True) == ".######.."


def test_where_one_microbatch_is_in_flight_it_is_away_all_the_time():
    assert events("FBFBFBFB", beside=False) == "########."
    assert events("FB", beside=True) == "##."
    assert events("FB", beside=False) == "##."


def test_in_evaluation_it_comes_back_at_the_end():
    assert events("FFFF", beside=True, training=False) == ".###."
    assert events("FFFF", beside=False, training=False) == "####."
    assert events("F", beside=True, training=False) == "#."


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
    there = torch.cuda.memory_allocated()
    for _ in range(2):
        state.leave()
        state.let_go()
        assert there - torch.cuda.memory_allocated() == weight.nbytes
        state.send_for()
        state.back()
        assert torch.equal(weight.cpu(), was)
