"""Parallel states of modules on ranks of their own: what ranks have that the decoder has not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from ranks import run_ranks
from state_ranks import DECODER, ENCODER

from loongplug.parallel.layout import Layout
from loongplug.parallel.states import (
    adopt_own_ranks,
    create_parallel_state,
    decoder_layout,
    destroy_parallel_states,
    layout_of,
    parallel_state_of,
    process_groups,
    rest_in,
)

DECODES, ENCODES = Layout(), Layout(dp=2, first_rank=1)
replicas = parallel_state.get_data_parallel_world_size


def _placed() -> None:
    """The states of the decoder, on the first rank, and of the encoder, on two others."""
    initialize = partial(
        parallel_state.initialize_model_parallel,
        create_gloo_process_groups=False,
        local_world_size=DECODES.world_size,
    )
    adopt_own_ranks(DECODER, DECODES, gloo=False, initialize=initialize)
    create_parallel_state(ENCODER, ENCODES, seed=5)


def _everywhere(check: Callable[[int], None], rank: int) -> None:
    _placed()
    assert (decoder_layout(), layout_of(ENCODER)) == (DECODES, ENCODES)
    check(rank)
    destroy_parallel_states()


def _in_its_own(rank: int) -> None:
    """Who is where; a rank of the encoder is nowhere until it is given a place to rest in."""
    here, elsewhere = (DECODER, ENCODER) if rank in DECODES.ranks else (ENCODER, DECODER)
    with pytest.raises(RuntimeError, match=f"no part in '{elsewhere}'"):
        process_groups(elsewhere)
    assert dist.get_process_group_ranks(process_groups(here).dp) == [*layout_of(here).ranks]
    assert parallel_state.model_parallel_is_initialized() == (here == DECODER)
    if here == DECODER:
        assert replicas() == DECODES.dp
        return
    rest_in(ENCODER, dp=DECODES.dp)
    for _ in range(2):
        assert replicas() == DECODES.dp  # of samples that all ranks go through together
        with parallel_state_of(ENCODER):
            assert replicas() == ENCODES.dp
            assert parallel_state.get_data_parallel_rank() == rank - ENCODES.first_rank
    total = torch.tensor([rank])
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    assert total.item() == sum(ENCODES.ranks)


def _numbers() -> list[float]:
    with get_cuda_rng_tracker().fork():
        sharded = torch.rand(2)
    return [*torch.rand(2).tolist(), *sharded.tolist()]


def _random_numbers(rank: int) -> None:
    """What is seeded and drawn at rest leaves the module's own numbers, and the reverse."""
    if rank in DECODES.ranks:
        return
    with parallel_state_of(ENCODER):
        kept = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        own = _numbers() + _numbers()
        torch.set_rng_state(kept[0])
        get_cuda_rng_tracker().set_states(kept[1])
    rest_in(ENCODER, dp=DECODES.dp)

    def seeded() -> None:
        torch.manual_seed(99)
        model_parallel_cuda_manual_seed(99, force_reset_rng=True)

    seeded()
    resting = _numbers() + _numbers()
    seeded()
    with parallel_state_of(ENCODER):
        found = _numbers()
    rested = _numbers()
    with parallel_state_of(ENCODER):
        found += _numbers()
    assert found == own
    assert rested + _numbers() == resting


@pytest.mark.parametrize("check", [_in_its_own, _random_numbers])
def test_ranks_that_the_decoder_has_not(check: Callable[[int], None]) -> None:
    run_ranks(partial(_everywhere, check), 3)
