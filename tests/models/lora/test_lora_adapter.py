"""What adapters drop: the same on ranks of a group where these see the same."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch import Tensor, nn

from loongplug.models.layers.linear import LocalColumnParallelLinear, LocalRowParallelLinear
from loongplug.models.lora import LoraSettings
from loongplug.models.lora.adapter import add_adapters

pytestmark = pytest.mark.quick

TOKENS, BATCH, IN, OUT = 6, 2, 8, 12


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
