"""Ranks compare what they were started with: equal ones go on, others all end with one sentence."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from loongplug.parallel.same_values import differences, name_ranks, require_same_values

pytestmark = pytest.mark.quick

SAME = {"--lr": "0.001", "--seed": "1234"}
OTHER = {"--lr": "0.002", "--seed": "1234"}
FIRST = "ranks were started differently; give all of them one command line, one set of files and "


def compared(
    values: list[dict[str, str] | None], *, after: float = 0.0, timeout: float = 20.0
) -> list[str | None]:
    """What each rank is told, a thread each: None where it may go on, or never came.

    A rank without values never comes; the last rank comes ``after`` seconds.
    """
    store = dist.HashStore()

    def rank(number: int) -> str | None:
        if values[number] is None:
            return None
        if number == len(values) - 1:
            time.sleep(after)
        try:
            require_same_values(
                values[number],
                store=store,
                rank=number,
                world_size=len(values),
                timeout=timedelta(seconds=timeout),
            )
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(rank, range(len(values))))


def test_equal_ranks_go_on_once_all_are_there():
    started = time.monotonic()
    assert compared([SAME] * 4, after=0.5) == [None] * 4
    assert time.monotonic() - started >= 0.5


def test_one_that_differs_ends_all_with_one_sentence():
    told = compared([SAME, SAME, SAME, OTHER])
    assert len({*told}) == 1
    text = told[0]
    assert text.startswith(FIRST)
    assert text.splitlines()[1:] == ["  --lr: 0.001 on ranks 0-2; 0.002 on rank 3"]


@pytest.mark.not_quick
def test_a_rank_that_never_comes_is_named():
    told = compared([SAME, SAME, None, SAME, None], timeout=2.0)
    assert told[0] == told[1] == told[3]
    assert told[0].startswith("ranks 2, 4 did not come within the time")
    assert "--distributed-timeout-minutes" in told[0]
    assert "the others" not in told[0]


@pytest.mark.not_quick
def test_beside_a_rank_that_never_comes_differences_of_the_others_are_told():
    first, last = compared([SAME, None, OTHER], timeout=2.0)[::2]
    assert first == last
    assert first.startswith("rank 1 did not come within the time")
    assert first.splitlines()[1].startswith(f"the others: {FIRST}")
    assert first.splitlines()[2:] == ["  --lr: 0.001 on rank 0; 0.002 on rank 2"]


def test_differences_are_named_by_value_and_rank():
    found = {0: {"a": "1", "b": "x"}, 1: {"a": "2", "b": "x"}, 2: {"a": "1", "b": "x", "c": "3"}}
    assert differences(found) == [
        "a: 1 on ranks 0, 2; 2 on rank 1",
        "c: nothing on ranks 0-1; 3 on rank 2",
    ]


def test_ranks_are_named_in_spans():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
