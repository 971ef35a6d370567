"""Norms, scales and Adam's steps of all tensors at once: the numbers of one by one."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.optimizer import clip_grads
from on_a_gpu import in_fresh_interpreter
from torch import Tensor
from torch.optim import adam as torch_adam
from torch.utils._python_dispatch import TorchDispatchMode

from loongplug.platform import current_platform
from loongplug.platform.multi_tensor import fused_adam, norm_of_all, scale_of_all

pytestmark = pytest.mark.quick

SIZES = ((7, 5), (300,), (1,), (0,), (64, 32))


def drawn(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]


class Waits(TorchDispatchMode):
    """Counts what a GPU's host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_one_vector_and_nobody_waits_for_it(dtype: torch.dtype) -> None:
    lists = [drawn(1, dtype=dtype), drawn(2, dtype=dtype)]
    norm = norm_of_all(lambda: None)
    with Waits() as waits:
        found, nothing = norm(1, None, lists, False)
    assert waits.count == 0
    assert nothing is None
    assert (found.shape, found.dtype) == ((1,), torch.float32)
    whole = torch.cat([each.flatten().double() for tensors in lists for each in tensors])
    torch.testing.assert_close(found[0].double(), whole.norm(), rtol=1e-6, atol=0)


def test_a_norm_with_what_is_not_finite_is_not_finite() -> None:
    for broken in (float("nan"), float("inf")):
        tensors = drawn(1)
        tensors[1][17] = broken
        assert not norm_of_all(lambda: None)(1, None, [tensors], False)[0].isfinite()


def test_norms_of_nothing_and_of_several_devices_are_upstream_s() -> None:
    asked: list[Any] = []
    norm = norm_of_all(lambda *given: asked.append(given))
    for tensors in ([], [torch.ones(2), torch.ones(2, device="meta")]):
        norm(1, None, [tensors], False)
        assert asked.pop() == (1, None, [tensors], False)


def test_tensors_are_scaled_in_place_and_others_as_ever() -> None:
    asked: list[Any] = []
    scale = scale_of_all(lambda *given: asked.append(given))
    tensors, expected = drawn(4), [each * 0.3 for each in drawn(4)]
    addresses = [each.data_ptr() for each in tensors]
    scale(1, None, [tensors, list(tensors)], 0.3)
    assert [each.data_ptr() for each in tensors] == addresses
    assert all(map(torch.equal, tensors, expected))
    assert not asked
    scale(1, None, [tensors, drawn(5)], 0.3)
    assert len(asked) == 1
    scale(1, None, [[], []], 0.3)  # torch takes no empty lists
    assert len(asked) == 2


def test_a_rank_without_gradients_clips_nothing() -> None:
    """Its shard may hold padding only, or none of a group's parameters."""
    clip_grads.clip_grad_by_total_norm_fp32([], max_norm=1.0, total_norm=2.0)


SETTINGS: list[dict[str, Any]] = [
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
    {"decoupled_weight_decay": False, "weight_decay": 0.1, "maximize": True},
]
DEFAULTS: dict[str, Any] = {
    "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "maximize": False, "amsgrad": False,
    "has_complex": False, "capturable": False, "differentiable": False,
}  # fmt: skip


def state(device: str = "cpu") -> tuple[list[Tensor], ...]:
    """Parameters, gradients, two moments, and steps on the host, which differ."""
    params, grads, first, second = (drawn(seed, device=device) for seed in range(4))
    steps = [torch.tensor(float(3 * (number % 2))) for number in range(len(SIZES))]
    return params, grads, first, [each.square() for each in second], steps


def stepped(adam: Any, settings: dict[str, Any]) -> tuple[list[Tensor], ...]:
    params, grads, first, second, steps = state()
    adam(params, grads, first, second, [], steps, None, None, **{**DEFAULTS, **settings})
    return params, first, second, steps


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_are_those_of_torch_s_fused_adam(settings: dict[str, Any]) -> None:
    """Tensors at different steps, too; these stay on the host."""
    ours = stepped(fused_adam(lambda *_, **__: pytest.fail("not served")), settings)
    for found, expected in zip(ours, stepped(torch_adam._fused_adam, settings), strict=True):
        assert all(map(torch.equal, found, expected))


def test_what_the_kernel_does_not_serve_is_left_to_torch() -> None:
    asked: list[Any] = []
    step = fused_adam(lambda *given, **settings: asked.append((given, settings)))
    lists = state()
    settings = DEFAULTS | {"amsgrad": True}
    step(*lists[:4], [], lists[4], **settings)
    assert asked == [((*lists[:4], [], lists[4]), settings)]


def test_a_group_without_parameters_is_left_to_torch() -> None:
    """Torch says of empty lists that they go over lists, on any device."""
    optimizer = torch.optim.AdamW([{"params": [torch.ones(2)]}, {"params": [torch.ones(3)]}])
    with patch.object(torch_adam, "_multi_tensor_adam", fused_adam(torch_adam._multi_tensor_adam)):
        optimizer.step()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    in_fresh_interpreter(__file__, "steps_on_a_gpu")


def steps_on_a_gpu() -> None:
    """Adam's steps with the platform's table are torch's one by one, and nothing waits."""
    assert current_platform().name == "cuda"
    for decoupled in (True, False):
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        found = []
        for options in ({}, {"foreach": False}):
            parameters = drawn(0, device="cuda")
            optimizer = kind(parameters, lr=0.01, weight_decay=0.1, **options)
            for seed in (5, 6, 7):
                for parameter, grad in zip(parameters, drawn(seed, device="cuda"), strict=True):
                    parameter.grad = grad
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.set_sync_debug_mode("error" if seed > 5 and not options else "default")
                optimizer.step()
                torch.cuda.set_sync_debug_mode("default")
                if seed > 5 and not options:
                    assert torch.cuda.max_memory_allocated() - before < 1 << 20
            found.append(parameters)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    norms = [
        norm_of_all(lambda: None)(1, None, [drawn(1, device=each)], False)[0]
        for each in ("cpu", "cuda")
    ]
    torch.testing.assert_close(norms[1].cpu(), norms[0])
