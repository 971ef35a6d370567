"""Groups for exchanges, and their connections, which are made in one order."""

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from state_ranks import ENCODER, adopted

from loongplug.parallel.exchange_groups import connect, create_exchange_group

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
    with patch.object(dist, "send", sending), patch.object(dist, "recv", receiving):
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


def _exchange_group(rank: int, folder: str) -> tuple[list[int] | None, list[float]]:
    """The ranks of the group for an exchange, and its timeouts; None on a rank outside."""
    config = Path(folder) / f"nccl-{rank}.yaml"
    config.write_text("mp:\n  max_ctas: 8\n")  # options of other groups
    with adopted(tp=2):
        group = create_exchange_group(
            ENCODER,
            ((0, 1), (3,)),
            options_of="tp",
            timeout_minutes=0.5,
            nccl_config_path=str(config),
        )
        tp = parallel_state.get_tensor_model_parallel_group()
        if group is not None:
            assert group is not tp
            dist.barrier(group)

        def timeouts() -> list[float]:
            options = [] if group is None else [group._get_backend(torch.device("cpu")).options]
            return [each._timeout.total_seconds() for each in options]

        before = timeouts()
        parallel_state.update_pg_timeout(timedelta(seconds=7))
        ranks = None if group is None else dist.get_process_group_ranks(group)
        return ranks, before + timeouts()


def test_an_exchange_has_a_group_of_its_own(tmp_path: Path) -> None:
    inside = [30.0, 7.0]
    assert run_ranks(_exchange_group, 4, folder=str(tmp_path)) == [
        ([0, 1], inside),
        ([0, 1], inside),
        (None, []),
        ([3], inside),
    ]


def _options(rank: int, folder: str) -> list[tuple[bool, int]]:
    """NCCL's of groups for an all-to-all, for messages, and for those with a file of options."""
    config = Path(folder) / "nccl.yaml"
    config.write_text("pp:\n  max_ctas: 2\n  is_high_priority_stream: false\n")
    given: list[Any] = []
    with (
        adopted(),
        patch.object(dist, "get_backend", return_value="nccl"),
        patch.object(parallel_state, "create_group", lambda *_, **more: given.append(more)),
    ):
        for options_of, pairs in (("tp", None), ("mp", []), ("pp", [])):
            create_exchange_group(
                ENCODER,
                ((0,),),
                options_of=options_of,
                pairs=pairs,
                nccl_config_path=str(config) if options_of == "pp" else None,
            )
    found = [each["pg_options"] for each in given]
    return [(each.is_high_priority_stream, each.config.max_ctas) for each in found]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_messages_hold_few_multiprocessors_and_streams_are_of_the_other_pool(
    tmp_path: Path,
) -> None:
    nccls = dist.ProcessGroupNCCL.Options().config.max_ctas  # type: ignore[attr-defined]
    expected = [(True, nccls), (True, 4), (False, 2)]
    assert run_ranks(_options, 1, folder=str(tmp_path)) == [expected]
