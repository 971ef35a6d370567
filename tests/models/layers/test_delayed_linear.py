"""Linears that leave their weights' gradients to a schedule: not a bit differs from the others."""

from typing import Any

import pytest
import torch
from layer_configs import vision_config
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers import linear
from loongplug.models.layers.linear import (
    DelayedColumnParallelLinear,
    DelayedRowParallelLinear,
    LocalColumnParallelLinear,
    LocalRowParallelLinear,
)

KINDS = {
    "column": (LocalColumnParallelLinear, DelayedColumnParallelLinear, {}),
    "row": (LocalRowParallelLinear, DelayedRowParallelLinear, {"input_is_parallel": True}),
}
LENGTHS = (6, 0, 4)  # tokens of the microbatches; an expert may be given none


def made(kind: type, config: Any, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(7)
    linear = kind(32, 24, config=config, init_method=config.init_method, **options).to(dtype)
    for seed, parameter in enumerate(linear.parameters()):
        generator = torch.Generator().manual_seed(seed)
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return linear


def inputs(
    width: int, *, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [
        torch.randn(length, 2, width, generator=generator).to(dtype).requires_grad_()
        for length in lengths
    ]


def went_through(linear: Any, microbatches: list[Tensor]) -> list[Tensor | None]:
    """All forward, then each backward, with the weight's gradient right behind it."""
    outputs = []
    for microbatch in microbatches:
        output, bias = linear(microbatch)
        outputs.append(output if bias is None else output + bias)
    for output in outputs:
        generator = torch.Generator().manual_seed(output.shape[0])
        output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
        linear.backward_dw()
    return [
        *(output.detach() for output in outputs),
        *(microbatch.grad for microbatch in microbatches),
        *(parameter.grad for parameter in linear.parameters()),
    ]


def _same_bits(rank: int, *, tp: int, sequence: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    with model_parallel(tp=tp):
        config = vision_config(tensor_model_parallel_size=tp, sequence_parallel=sequence)
        lengths = (6, 4) if sequence else LENGTHS
        for name, (ordinary, delayed, more) in KINDS.items():
            for options in ({"bias": False}, {"bias": True}, {"bias": True, "skip_bias_add": True}):
                linears = [
                    made(kind, config, dtype=dtype, **({"skip_bias_add": False} | options | more))
                    for kind in (ordinary, delayed)
                ]
                width = linears[0].weight.shape[1]
                theirs, ours = (
                    went_through(each, inputs(width, lengths=lengths, dtype=dtype))
                    for each in linears
                )
                assert linears[1].weight.grad is not None
                assert linears[1].weight.grad.abs().max() > 0
                for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
                    assert one is not None
                    assert torch.equal(one, other), (name, options, place)


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
def test_gradients_are_those_of_the_ordinary_linear(tp: int, sequence: bool) -> None:
    run_ranks(_same_bits, tp, tp=tp, sequence=sequence)


@pytest.mark.parametrize("tp", [1, 2])
def test_large_products_are_those_of_the_ordinary_linear(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_LARGE", 1)
    run_ranks(_same_bits, tp, tp=tp, sequence=False, dtype=torch.float32)


def _kept_and_told(rank: int) -> None:
    with model_parallel(tp=1):
        config = vision_config()
        linear = made(DelayedColumnParallelLinear, config, bias=False, skip_bias_add=False)
        first, second = (linear(each)[0] for each in inputs(32, lengths=(6, 4)))
        told: list[bool] = []
        linear.register_wgrad_accumulation_and_reduce_hooks(
            lambda: told.append(linear.weight.grad is not None)
        )
        assert linear.weight.skip_backward_post_hook
        with pytest.raises(AssertionError, match="without a backward"):
            linear.backward_dw()
        first.sum().backward()
        assert linear.waits
        assert linear.weight.grad is None
        assert told == []
        with pytest.raises(AssertionError, match="two backwards"):
            second.sum().backward()
        linear.backward_dw()
        assert told == [True]
        assert not linear.waits
        # What needs no gradient is not kept: neither of an evaluation nor of a frozen weight.
        with torch.no_grad():
            linear(inputs(32)[0])
        assert not linear.waits
        frozen = made(DelayedColumnParallelLinear, config, bias=True, skip_bias_add=False)
        frozen.weight.requires_grad_(False)
        (microbatch,) = inputs(32, lengths=(6,))
        frozen(microbatch)[0].sum().backward()
        frozen.backward_dw()
        assert not frozen.waits
        assert frozen.weight.grad is None
        assert microbatch.grad is not None
        assert torch.equal(frozen.bias.grad, torch.full((24,), 12.0).bfloat16())


def test_what_is_kept_and_who_is_told() -> None:
    run_ranks(_kept_and_told, 1)
