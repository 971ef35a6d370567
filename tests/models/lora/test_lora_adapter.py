"""An adapter beside a sharded linear against plain matrices on one rank."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch import Tensor, nn

from loongplug.models.layers.linear import LocalColumnParallelLinear, LocalRowParallelLinear
from loongplug.models.lora.adapter import Adapter, add_adapters
from loongplug.models.lora.settings import LoraSettings

pytestmark = pytest.mark.quick

TOKENS, BATCH, IN, OUT = 6, 2, 8, 12
SETTINGS = LoraSettings(rank=3, alpha=6.0, target_modules=("linear_qkv",))


@dataclass(frozen=True)
class Given:
    """The whole matrices, the input and the gradient of the output."""

    weight: Tensor
    a: Tensor
    b: Tensor
    x: Tensor
    grad: Tensor


def given() -> Given:
    torch.manual_seed(7)
    return Given(
        weight=torch.randn(OUT, IN),
        a=torch.randn(3, IN),
        b=torch.randn(OUT, 3),
        x=torch.randn(TOKENS, BATCH, IN),
        grad=torch.randn(TOKENS, BATCH, OUT),
    )


@dataclass(frozen=True)
class Found:
    """Output and gradients, of a rank's slices or of everything."""

    output: Tensor
    x: Tensor
    a: Tensor
    b: Tensor


def dense() -> Found:
    values = given()
    a, b = values.a.requires_grad_(), values.b.requires_grad_()
    x = values.x.requires_grad_()
    output = x @ values.weight.T + 2.0 * x @ a.T @ b.T
    output.backward(values.grad)
    return Found(output.detach(), x.grad, a.grad, b.grad)


def slice_of(tensor: Tensor, dim: int, group) -> Tensor:
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def sharded(rank: int, *, column: bool, sequence_parallel: bool, expert: bool, tp: int) -> Found:
    """This rank's part of the step, after what Megatron does to marked gradients."""
    with model_parallel(tp=tp):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=IN,
            num_attention_heads=2,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        if expert:  # Megatron refuses a layer of one expert, and asks for no more here
            config.expert_tensor_parallel_size = tp
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        values, holder = given(), nn.Module()
        options = {
            "config": config,
            "init_method": torch.nn.init.zeros_,
            "bias": False,
            "skip_bias_add": True,
            "is_expert": expert,
            "tp_group": group,
        }
        inner = nn.Module()
        setattr(holder, "experts" if expert else "attention", inner)
        inner.linear_qkv = (
            LocalColumnParallelLinear(IN, OUT, gather_output=False, **options)
            if column
            else LocalRowParallelLinear(IN, OUT, input_is_parallel=True, **options)
        )
        add_adapters(holder, SETTINGS)
        adapter: Adapter = inner.linear_qkv_lora
        with torch.no_grad():
            inner.linear_qkv.weight.copy_(slice_of(values.weight, 0 if column else 1, group))
            adapter.a.copy_(values.a if column else slice_of(values.a, 1, group))
            adapter.b.copy_(slice_of(values.b, 0, group) if column else values.b)
        x, grad = values.x, values.grad
        if column:
            grad = slice_of(grad, 2, group)
            x = slice_of(x, 0, group) if sequence_parallel and not expert else x
        else:
            x = slice_of(x, 2, group)
            grad = slice_of(grad, 0, group) if sequence_parallel and not expert else grad
        x = x.clone().requires_grad_()
        output, bias = inner.linear_qkv(x)
        assert bias is None
        output.backward(grad)
        assert inner.linear_qkv.weight.grad is None
        output = output.detach()
        for parameter in adapter.parameters():
            if getattr(parameter, "sequence_parallel", False):
                assert sequence_parallel
                dist.all_reduce(parameter.grad, group=group)
        if expert and tp > 1:  # what the dispatcher does
            dist.all_reduce(x.grad if column else output, group=group)
        return Found(output, x.grad, adapter.a.grad, adapter.b.grad)


CASES = [
    pytest.param(column, sp, expert, tp, id=f"{'column' if column else 'row'}-{name}-tp{tp}")
    for column in (True, False)
    for name, sp, expert in (("plain", False, False), ("sp", True, False), ("expert", True, True))
    for tp in (1, 2)
]


@pytest.mark.not_quick
@pytest.mark.parametrize(("column", "sequence_parallel", "expert", "tp"), CASES)
def test_outputs_and_gradients_are_those_of_plain_matrices(column, sequence_parallel, expert, tp):
    expected = dense()
    found = run_ranks(
        sharded,
        tp,
        column=column,
        sequence_parallel=sequence_parallel and tp > 1,
        expert=expert,
        tp=tp,
    )
    over_sequence = sequence_parallel and not expert
    splits: dict[str, int | None] = {
        "output": 2 if column else (0 if over_sequence else None),
        "x": (0 if over_sequence else None) if column else 2,
        "a": None if column else 1,
        "b": 0 if column else None,
    }
    for name, dim in splits.items():
        parts = [getattr(each, name) for each in found]
        if dim is None:
            assert all(torch.equal(parts[0], each) for each in parts), name
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        torch.testing.assert_close(whole, getattr(expected, name), rtol=1e-5, atol=1e-5)


def dropped(rank: int, *, column: bool, sequence_parallel: bool) -> Tensor:
    """What training's dropout leaves of an input of ones, seen through an adapter of ones."""
    with model_parallel(tp=2):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=IN,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
        )
        kind = LocalColumnParallelLinear if column else LocalRowParallelLinear
        more = {"gather_output": False} if column else {"input_is_parallel": True}
        holder = nn.Module()
        holder.linear_qkv = kind(
            IN, OUT, config=config, init_method=torch.nn.init.zeros_, bias=False,
            skip_bias_add=True, tp_group=parallel_state.get_tensor_model_parallel_group(), **more,
        )  # fmt: skip
        add_adapters(holder, LoraSettings(rank=1, dropout=0.5, target_modules=("linear_qkv",)))
        torch.manual_seed(1)  # the same on all ranks, as in a run
        drop = holder.linear_qkv_lora._dropped
        # with sequence parallelism, the transformer block enters the tracker for all its layers
        with get_cuda_rng_tracker().fork() if sequence_parallel else nullcontext():
            result = drop(torch.ones(TOKENS, BATCH, IN))
        holder.eval()
        assert drop(torch.ones(2)).eq(1).all()
        return result


@pytest.mark.parametrize(
    ("column", "sequence_parallel", "same"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_dropout_is_the_same_where_ranks_see_the_same(column, sequence_parallel, same):
    first, second = run_ranks(dropped, 2, column=column, sequence_parallel=sequence_parallel)
    assert 0 < first.eq(0).sum() < first.numel()
    assert torch.equal(first, second) is same
