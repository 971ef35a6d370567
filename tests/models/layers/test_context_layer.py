"""Whole decoder layers of Megatron's, of which each rank has a part of the tokens."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from ranks import model_parallel, run_ranks
from test_layer_specs import Numbers, build, full_parameters, randn, shard

from loongplug.context.balance import balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.packed import PackedSegments, pack_segments
from loongplug.models.layers.rope import rope_table

LENGTHS = {False: [24], True: [11, 1, 6, 6]}  # of a row that is no pack, and of a pack
ROWS = {False: 3, True: 1}


def split_of(*, packed: bool, cp: int) -> TokenSplit:
    return balanced(Segments.of(LENGTHS[True]), cp=cp, block=3) if packed else zigzag(24, cp=cp)


def run_layer(
    rank: int, *, cp: int, tp: int, comm_type: str, packed: bool, recompute: bool
) -> Numbers:
    """This part's output and input gradient, and this rank's parameter gradients of all parts."""
    with model_parallel(tp=tp, cp=cp):
        config, layer = build(
            "decoder",
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            context_parallel_size=cp,
            cp_comm_type=comm_type,
            **{"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
            if recompute
            else {},
        )
        full = full_parameters(layer, tp)
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(shard(full[name], name, rank % tp, tp, gated=True))
        split = split_of(packed=packed, cp=cp)
        mine = torch.from_numpy(split.parts[rank // tp].places)
        sizes = (24, ROWS[packed])
        x, weights = (randn(seed, *sizes, config.hidden_size)[mine] for seed in (1, 3))
        table = rope_table(randn(2, *sizes, 1, 4)[mine], dtype=torch.float32)
        if tp > 1:
            x, weights = (each.chunk(tp)[rank % tp].clone() for each in (x, weights))
        row = context_row(split, LENGTHS[packed], rank=rank // tp, device="cpu")
        params = PackedSegments(qkv_format="thd" if packed else "sbhd", context=row)
        if cp == 1:
            params = pack_segments(LENGTHS[True], device="cpu") if packed else None
        x.requires_grad_()
        output, _ = layer(x, None, rotary_pos_emb=table, packed_seq_params=params)
        (output * weights).sum().backward()
        _allreduce_non_tensor_model_parallel_grads(
            [layer], config, get_tensor_model_parallel_group()
        )
        numbers = {"output": output.detach(), "input": x.grad}
        if tp > 1:
            numbers = {
                name: gather_from_sequence_parallel_region(value, False)
                for name, value in numbers.items()
            }
        for name, parameter in layer.named_parameters():
            dist.all_reduce(parameter.grad, group=get_context_parallel_group())
            numbers[name] = parameter.grad
        return {name: value.clone() for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("cp", "tp", "comm_type", "recompute"),
    [
        (2, 1, "all_gather", False),
        (2, 1, "a2a", True),
        (3, 1, "p2p", False),
        (2, 2, "all_gather", True),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_a_layer_are_the_layer(
    cp: int, tp: int, comm_type: str, recompute: bool, packed: bool
) -> None:
    how = {"comm_type": comm_type, "packed": packed}
    (one,) = run_ranks(run_layer, 1, cp=1, tp=1, recompute=False, **how)
    ranks = run_ranks(run_layer, cp * tp, cp=cp, tp=tp, recompute=recompute, **how)
    split = split_of(packed=packed, cp=cp)
    for rank, numbers in enumerate(ranks):
        assert numbers.keys() == one.keys()
        for name, full in one.items():
            if name in ("output", "input"):
                expected = full[torch.from_numpy(split.parts[rank // tp].places)]
            else:
                expected = shard(full, name, rank % tp, tp, gated=True)
            difference = (numbers[name] - expected).abs().max() / full.abs().max()
            assert difference < 5e-6, (name, rank, difference)
