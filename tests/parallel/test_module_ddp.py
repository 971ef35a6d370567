"""One wrapper of several: groups, factors, hooks and optimizers of each part are its own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from state_ranks import ENCODER, adopted
from torch import nn

from loongplug.parallel.layout import encoder_layout
from loongplug.parallel.module_ddp import ModuleDataParallel
from loongplug.parallel.module_state import ModulePart, ModuleState
from loongplug.parallel.optimizer_per_module import optimizer_per_module
from loongplug.parallel.states import TEXT_DECODER, create_parallel_state, layout_of, process_groups

pytestmark = pytest.mark.quick

FACTOR = 0.5


class Chunk(MegatronModule):
    """An encoder of one weight, where there is one, and a decoder of one weight."""

    def __init__(self, config: TransformerConfig, encoder: ModuleState, *, with_encoder: bool):
        super().__init__(config)
        self.encoder_state = encoder
        self.image_encoder = nn.Linear(1, 1, bias=False) if with_encoder else None
        self.text_decoder = nn.Linear(1, 1, bias=False)

    def parallel_parts(self) -> tuple[ModulePart, ...]:
        encoder = {} if self.image_encoder is None else {"image_encoder": self.image_encoder}
        decoder = ModuleState(groups=ProcessGroupCollection.use_mpu_process_groups())
        return (
            ModulePart(name="image_encoder", state=self.encoder_state, modules=encoder),
            ModulePart(
                name="text_decoder", state=decoder, modules={"text_decoder": self.text_decoder}
            ),
        )


def wrapped(rank: int, *, overlap: bool = False, distributed: bool = False) -> ModuleDataParallel:
    """Decoder TP 2 x PP 2 on 4 ranks; the encoder, of TP 1, has two replicas in the first stage."""
    create_parallel_state(
        ENCODER, encoder_layout(layout_of(TEXT_DECODER), tp=1, on_first_stage=True), seed=1
    )
    state = ModuleState(groups=process_groups(ENCODER), state=ENCODER, gradient_factor=FACTOR)
    config = TransformerConfig(
        num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True
    )
    chunk = Chunk(config, state, with_encoder=rank < 2)
    chunk.text_decoder.weight.tensor_model_parallel = True  # each rank has another slice
    return ModuleDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, use_distributed_optimizer=distributed
        ),
        chunk,
    )


def gradients(rank: int) -> tuple[float | None, float]:
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank)
        for parameter in ddp.parameters():
            parameter.main_grad.fill_(rank + 1.0)
        ddp.finish_grad_sync()
        encoder = ddp.module.image_encoder
        return (
            None if encoder is None else encoder.weight.main_grad.item(),
            ddp.module.text_decoder.weight.main_grad.item(),
        )


def test_each_part_sums_over_its_own_replicas():
    # The encoder's replicas are ranks 0 and 1: (1 + 2) / 2. The decoder's have one rank each.
    assert run_ranks(gradients, 4) == [(1.5, 1.0), (1.5, 2.0), (None, 3.0), (None, 4.0)]


def broadcast(rank: int) -> list[float]:
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(float(rank))
        ddp.broadcast_params()
        return [parameter.item() for parameter in ddp.parameters()]


def test_each_part_is_broadcast_among_its_own_replicas():
    assert run_ranks(broadcast, 4) == [[0.0, 0.0], [0.0, 1.0], [2.0], [3.0]]


def apart(rank: int) -> tuple[bool, bool, list[bool]]:
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank, overlap=True)
        ddp.outside_schedule.add("image_encoder")
        ddp.start_grad_sync()
        started = {
            name: [group.grad_reduce_handle is not None for group in part.bucket_groups]
            for name, part in ddp.parts.items()
        }
        ddp.force_all_reduce = True
        return (
            any(started["image_encoder"]),
            all(started["text_decoder"]),
            [part.force_all_reduce for part in ddp.parts.values()],
        )


@pytest.mark.not_quick
def test_a_part_that_runs_apart_is_left_to_itself():
    for encoder, decoder, forced in run_ranks(apart, 4):
        assert not encoder
        assert decoder
        assert forced == [True, True]


def optimizers(rank: int, *, distributed: bool) -> tuple[list[int], float]:
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank, distributed=distributed)
        config = OptimizerConfig(
            optimizer="adam", lr=0.1, use_distributed_optimizer=distributed, clip_grad=0.0
        )
        chain: Any = optimizer_per_module(get_megatron_optimizer)(
            config, [ddp], use_gloo_process_groups=True
        )
        assert isinstance(chain, ChainedOptimizer)
        for parameter in ddp.parameters():
            parameter.main_grad.fill_(1.0)
        ddp.finish_grad_sync()
        chain.prepare_grads()
        norm = chain.get_grad_norm()
        dist.barrier()
        return [len(each.get_parameters()) for each in chain.chained_optimizers], norm


@pytest.mark.not_quick
@pytest.mark.parametrize("distributed", [False, True])
def test_every_rank_has_the_same_optimizers_and_one_norm(distributed):
    found = run_ranks(optimizers, 4, distributed=distributed)
    assert [len(counts) for counts, _ in found] == [2] * 4
    assert [counts[1] for counts, _ in found] == [1] * 4
    # One encoder weight, whose gradient of 1 is the same on both replicas, and four of the decoder.
    assert [norm for _, norm in found] == [pytest.approx(5**0.5)] * 4
