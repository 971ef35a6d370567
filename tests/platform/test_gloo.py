"""Collectives of unequal sizes on the CPU: the same numbers as NCCL gives."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.platform import gloo

SIZES = [[3, 0, 2], [0, 0, 0], [1, 1, 1], [0, 4, 0]]


def piece(rank: int, length: int) -> torch.Tensor:
    return torch.arange(length * 2.0).view(length, 2) + 100 * rank


def uneven(rank):
    """By sizes: what is gathered, and what is left of a scattered sum."""
    found = []
    for sizes in SIZES:
        gathered = [torch.full((size, 2), -1.0) for size in sizes]
        dist.all_gather(gathered, piece(rank, sizes[rank]))
        output = torch.full((sizes[rank], 2), -1.0)
        # rank r gives each target the target's piece, times r + 1
        dist.reduce_scatter(output, [piece(to, size) * (rank + 1) for to, size in enumerate(sizes)])
        found.append((gathered, output))
    return found


def test_tensors_of_unequal_sizes():
    for rank, found in enumerate(run_ranks(uneven, 3)):
        for sizes, (gathered, output) in zip(SIZES, found, strict=True):
            expected = [piece(other, size) for other, size in enumerate(sizes)]
            assert all(torch.equal(a, b) for a, b in zip(gathered, expected, strict=True))
            assert torch.equal(output, expected[rank] * 6)


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8]


def every_collective(rank, *, elements):
    """What the CPU's collectives give, and what gloo gives without them, by name."""
    from torch.distributed import distributed_c10d as gloos

    group = dist.new_group([0, 1, 2])  # of four
    found, expected = {}, {}
    for dtype in DTYPES:
        for name, op in REDUCTIONS.items():
            for results, calls in ((found, dist), (expected, gloos)):
                whole = (torch.arange(3 * elements) % 7 + 2 * rank).view(3, -1).to(dtype)
                key = (name, dtype)
                if rank == 3:
                    results[key] = calls.all_reduce(whole, op, group)
                    continue
                reduced, part, listed = whole.clone(), whole[0].clone(), whole[0].clone()
                into, into_list = torch.empty_like(whole.flatten()), list(torch.empty_like(whole))
                calls.all_reduce(reduced, op, group)
                calls.reduce_scatter_tensor(part, whole.flatten(), op, group)
                calls.reduce_scatter(listed, list(whole), op, group)
                calls.all_gather_into_tensor(into, whole[1].clone(), group)
                calls.all_gather(into_list, whole[2].clone(), group)
                results[key] = [reduced, part, listed, into, *into_list]
    return found, expected


@pytest.mark.parametrize("elements", [0, 1, 5, 100_000])
def test_they_give_what_gloo_gives(elements):
    """Small ones are one exchange, large ones gloo's own; who is not of the group has nothing."""
    for rank, (found, expected) in enumerate(run_ranks(every_collective, 4, elements=elements)):
        for key, tensors in expected.items():
            if rank == 3:
                assert found[key] is None
                continue
            for ours, theirs in zip(found[key], tensors, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs), key


def same_everywhere(rank):
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(1000, generator=generator) * 10.0 ** (rank * 3)
    dist.all_reduce(tensor)
    return tensor


def test_every_rank_has_the_same_bits():
    """In whichever order pieces come, they are added in one: sums of unequal size tell."""
    first, *others = run_ranks(same_everywhere, 4)
    assert all(torch.equal(first, other) for other in others)


def coalesced(rank):
    from torch.distributed import _coalescing_manager

    tensors = [torch.full((4,), float(rank + number)) for number in range(3)]
    with _coalescing_manager(dist.group.WORLD, async_ops=False):
        for tensor in tensors:
            dist.all_reduce(tensor)
    handle = dist.all_reduce(tensors[0], async_op=True)
    handle.wait()
    return tensors


def test_gathered_calls_and_those_that_go_on_are_gloos():
    """Whoever does not wait has a handle, and calls that a manager gathers are its."""
    for tensors in run_ranks(coalesced, 2):
        assert [tensor[0].item() for tensor in tensors] == [2.0, 3.0, 5.0]


def groups_of_a_rank(rank):
    """Groups that overlap, in which collectives are under way at one time; what they share."""
    pairs = [dist.new_group([first, (first + 1) % 3]) for first in range(3)]
    own = [group for group in pairs if group != dist.GroupMember.NON_GROUP_MEMBER]
    sums = [torch.full((100_000,), float(rank)) for _ in own]
    works = [
        dist.all_reduce(each, group=group, async_op=True)
        for each, group in zip(sums, own, strict=True)
    ]
    for work in works:
        work.wait()
    late = dist.new_group([0, 1, 2], timeout=timedelta(seconds=77))
    groups = (dist.group.WORLD, *own, late)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    devices = [each.options._devices[0] for each in backends]
    found = [
        (dist.get_process_group_ranks(group), each) for group, each in zip(own, sums, strict=True)
    ]
    kinds = [isinstance(each, gloo.distributed_c10d.ProcessGroupGloo) for each in backends]
    return found, len(set(map(id, devices))), backends[-1].options._timeout, all(kinds)


def test_all_groups_of_a_rank_talk_through_one_device():
    for found, devices, timeout, known in run_ranks(groups_of_a_rank, 3):
        assert len(found) == 2
        for members, result in found:
            assert torch.equal(result, torch.full((100_000,), float(sum(members))))
        assert devices == 1
        assert timeout == timedelta(seconds=77)
        assert known


def _alone(rank: int) -> None:
    tensor = torch.tensor([3.0, -1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist.distributed_c10d, "_check_single_tensor", lambda *_: pytest.fail("asked")
        )
        for op in REDUCTIONS.values():
            assert dist.all_reduce(tensor, op) is None
    assert tensor.tolist() == [3.0, -1.0]


def test_a_rank_that_is_alone_reduces_nothing() -> None:
    run_ranks(_alone, 1)
