"""One wrapper of several: groups, factors, hooks and optimizers of each part are its own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from state_ranks import ENCODER, adopted
from torch import nn

from loongplug.parallel.layout import encoder_layout
from loongplug.parallel.module_ddp import ModuleDataParallel
from loongplug.parallel.module_parts import ModulePart, ModuleState
from loongplug.parallel.optimizer_per_module import OptimizerPerModule, optimizer_per_module
from loongplug.parallel.states import TEXT_DECODER, create_parallel_state, layout_of, process_groups

pytestmark = pytest.mark.quick

FACTOR = 0.5


class Chunk(MegatronModule):
    """An encoder of one weight, where there is one, and a decoder of one weight."""

    def __init__(self, config: TransformerConfig, encoder: ModuleState | None):
        super().__init__(config)
        self.encoder_state = encoder
        self.image_encoder = nn.Linear(1, 1, bias=False) if encoder is not None else None
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


def wrapped(
    rank: int, *, overlap: bool = False, distributed: bool = False, frozen: str | None = None
) -> ModuleDataParallel:
    """Decoder TP 2 x PP 2 on 4 ranks; the encoder, of TP 1, has two replicas in the first stage."""
    create_parallel_state(
        ENCODER, encoder_layout(layout_of(TEXT_DECODER), tp=1, on_first_stage=True), seed=1
    )
    state = None
    if rank < 2:
        state = ModuleState(groups=process_groups(ENCODER), state=ENCODER, gradient_factor=FACTOR)
    config = TransformerConfig(
        num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True
    )
    chunk = Chunk(config, state)
    for name, module in chunk.named_children():
        module.requires_grad_(name != frozen)
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
            any(started.get("image_encoder", ())),
            all(started["text_decoder"]),
            [part.force_all_reduce for part in ddp.parts.values()],
        )


@pytest.mark.not_quick
def test_a_part_that_runs_apart_is_left_to_itself():
    found = run_ranks(apart, 4)
    for encoder, decoder, _ in found:
        assert not encoder
        assert decoder
    assert [forced for _, _, forced in found] == [[True, True]] * 2 + [[True]] * 2


def nested(rank: int) -> list[list[bool]]:
    """Whether gradients would be reduced: before, within and behind; and the same of one within."""
    with adopted(tp=2, pp=2):
        part = wrapped(rank, overlap=True).parts["text_decoder"]

        def reduced() -> bool:
            (group,) = part.bucket_groups
            last: bool = group.is_last_microbatch
            return last

        alone, within = [reduced()], []
        with part.no_sync():
            alone.append(reduced())
            with part.no_sync():
                within.append(reduced())
            within.append(reduced())
        return [[*alone, reduced()], within]


def test_backwards_that_are_not_the_last_leave_what_they_are_within() -> None:
    assert run_ranks(nested, 4) == [[[True, False, True], [False, False]]] * 4


def chain_of(ddp: ModuleDataParallel, **settings: Any) -> OptimizerPerModule:
    """The optimizers of a chunk, with the encoder's gradients 3 and the decoder's rank + 1."""
    config = OptimizerConfig(optimizer="adam", lr=0.1, **settings)
    chain = optimizer_per_module(get_megatron_optimizer)(
        config, [ddp], use_gloo_process_groups=True
    )
    assert isinstance(chain, OptimizerPerModule)
    encoder = ddp.module.image_encoder
    for parameter in ddp.parameters():
        ours = encoder is not None and parameter is encoder.weight
        if parameter.requires_grad:
            parameter.main_grad.fill_(3.0 if ours else dist.get_rank() + 1.0)
    ddp.finish_grad_sync()
    return chain


# One encoder weight, whose gradient of 3 is the same on both replicas, and four of the decoder.
NORM = (3.0**2 + 1 + 4 + 9 + 16) ** 0.5


def frozen(rank: int, *, name: str) -> tuple[bool, int]:
    """With one module frozen: what Megatron asks before it saves, and how many states there are."""
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank, frozen=name)
        chain = chain_of(ddp, use_distributed_optimizer=False, clip_grad=1.0)
        updated, norm, _ = chain.step()
        assert updated
        assert norm == pytest.approx(3.0 if name == "text_decoder" else 30**0.5)
        dist.barrier(parallel_state.get_model_parallel_group())  # nobody is behind in it
        return chain.is_stub_optimizer, len(chain._with_state())


@pytest.mark.parametrize(
    ("name", "states"), [("text_decoder", [1, 1, 0, 0]), ("image_encoder", [1] * 4)]
)
def test_all_ranks_save_what_some_of_them_train(name: str, states: list[int]) -> None:
    assert run_ranks(frozen, 4, name=name) == [(False, each) for each in states]


def clipped(rank: int, *, distributed: bool) -> tuple[list[int], float | None, list[float]]:
    """This rank's optimizers by number, the norm that a step tells, and gradients after it."""
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank, distributed=distributed)
        chain = chain_of(ddp, use_distributed_optimizer=distributed, clip_grad=1.0)
        updated, norm, _ = chain.step()
        assert updated
        gradients = [each.grad for each in chain.get_parameters() if each.grad is not None]
        values = [value for each in gradients for value in each.flatten().tolist()]
        return sorted(chain._with_state()), norm, values


@pytest.mark.parametrize("distributed", [False, True])
def test_every_rank_numbers_optimizers_alike_and_one_factor_clips_all(distributed: bool) -> None:
    found = run_ranks(clipped, 4, distributed=distributed)
    factor = 1.0 / (NORM + 1e-6)
    assert [numbers for numbers, *_ in found] == [[0, 1]] * 2 + [[1]] * 2
    assert [norm for _, norm, _ in found] == [pytest.approx(NORM)] * 4
    assert len({norm for _, norm, _ in found}) == 1  # bit for bit
    decoder = [gradients[-1] for *_, gradients in found]
    assert decoder == [pytest.approx((rank + 1) * factor) for rank in range(4)]
    # With the distributed optimizer, one of the replicas has the encoder's one element.
    encoder = [value for *_, gradients in found for value in gradients[:-1]]
    assert encoder == [pytest.approx(3.0 * factor)] * (1 if distributed else 2)


def not_finite(rank: int, *, value: float, of_encoder: bool) -> tuple[bool, float, list[Any]]:
    """Whether a scaled step finds it, the norm of one that does not look, and what a step says."""
    with adopted(tp=2, pp=2):
        ddp = wrapped(rank, distributed=True)
        found = []
        for scale in (1.0, None):
            chain = chain_of(ddp, use_distributed_optimizer=True, loss_scale=scale)
            broken = ddp.module.image_encoder if of_encoder else ddp.module.text_decoder
            if broken is not None and (of_encoder or rank == 3):
                broken.weight.main_grad.fill_(value)
            found.append(chain.prepare_grads())
            if scale is None:
                norm = chain.get_grad_norm()
            else:
                stepped = list(chain.step())
        assert found[1] is False
        return found[0], norm, stepped


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("of_encoder", [True, False], ids=["encoder", "decoder"])
def test_what_is_not_finite_in_one_entry_is_found_on_every_rank(
    value: float, of_encoder: bool
) -> None:
    for found, norm, stepped in run_ranks(not_finite, 4, value=value, of_encoder=of_encoder):
        assert found
        assert str(norm) == str(value)
        assert stepped == [False, None, None]
