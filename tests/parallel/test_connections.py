"""Connections are made in one order, by the ranks that have the group."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.parallel.connections import connect

PAIRS = [(0, 1), (0, 3), (2, 1)]


def _connected(rank: int) -> list[tuple[str, int]]:
    calls: list[tuple[str, int]] = []
    send, receive = dist.send, dist.recv

    def sending(tensor: torch.Tensor, *, dst: int, group: dist.ProcessGroup) -> None:
        calls.append(("to", dst))
        send(tensor, dst=dst, group=group)

    def receiving(tensor: torch.Tensor, *, src: int, group: dist.ProcessGroup) -> None:
        calls.append(("from", src))
        receive(tensor, src=src, group=group)

    group = dist.new_group([0, 1, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", sending)
        patch.setattr(dist, "recv", receiving)
        connect(group if rank < 4 else None, PAIRS, device=torch.device("cpu"))
    return calls


def test_each_pair_meets_once_in_the_order_that_is_given() -> None:
    assert run_ranks(_connected, 5, timeout=60.0) == [
        [("to", 1), ("to", 3)],
        [("from", 0), ("from", 2)],
        [("to", 1)],
        [("from", 0)],
        [],
    ]
