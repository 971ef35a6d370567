"""Collectives of unequal sizes on the CPU: the same numbers as NCCL gives."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

SIZES = [[3, 0, 2], [0, 0, 0], [1, 1, 1], [0, 4, 0]]


def piece(rank: int, length: int) -> torch.Tensor:
    return torch.arange(length * 2.0).view(length, 2) + 100 * rank


def gather(rank, *, sizes):
    gathered = [torch.full((size, 2), -1.0) for size in sizes]
    dist.all_gather(gathered, piece(rank, sizes[rank]))
    return gathered


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_gather(sizes):
    expected = [piece(rank, size) for rank, size in enumerate(sizes)]
    for gathered in run_ranks(gather, 3, sizes=sizes):
        assert all(torch.equal(a, b) for a, b in zip(gathered, expected, strict=True))


def scatter(rank, *, sizes):
    output = torch.full((sizes[rank], 2), -1.0)
    # rank r gives each target the target's piece, times r + 1
    dist.reduce_scatter(output, [piece(to, size) * (rank + 1) for to, size in enumerate(sizes)])
    return output


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reduce_scatter(sizes):
    for rank, output in enumerate(run_ranks(scatter, 3, sizes=sizes)):
        assert torch.equal(output, piece(rank, sizes[rank]) * 6)
