"""Blocks of a pack, dealt to ranks by their pairs."""

import numpy as np
import pytest
from numpy.typing import NDArray
from pace import times_slower

from loongplug.context.balance import BLOCK, balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import TokenSplit, zigzag

SLOWEST_OVER_MEAN = 1.01


def pack(tokens: int, *, median: int, spread: float, seed: int = 1) -> Segments:
    """Segments of lognormal lengths, as documents have them."""
    draws = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(max(32, draws.lognormal(np.log(median), spread)))
        lengths.append(min(length, left))
    return Segments.of([lengths[each] for each in draws.permutation(len(lengths))])


def pairs_of(split: TokenSplit, segments: Segments) -> NDArray[np.int64]:
    """By counting: a query's keys are its place in its segment, plus one."""
    padded = Segments.of(segments.lengths, padded_to=split.length)
    return np.array([(part.places - padded.starts(part.places) + 1).sum() for part in split.parts])


def slowest_over_mean(split: TokenSplit, segments: Segments) -> float:
    """How uneven the ranks' work is."""
    pairs = pairs_of(split, segments)
    return float(pairs.max() / pairs.mean())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokens", "cp", "median", "spread"),
    [
        (16384, 8, 800, 1.0),
        (16384, 4, 800, 1.0),
        (65536, 8, 4000, 1.2),
        (16384, 3, 800, 1.0),
        (1 << 20, 8, 4000, 1.2),  # more blocks than a heap deals out
    ],
)
def test_ranks_get_equal_work_of_packs(tokens: int, cp: int, median: int, spread: float) -> None:
    balance, zigzags = [], []
    for seed in range(10):
        segments = pack(tokens, median=median, spread=spread, seed=seed)
        balance.append(slowest_over_mean(balanced(segments, cp=cp), segments))
        zigzags.append(slowest_over_mean(zigzag(tokens, cp=cp), segments))
    print(f"{tokens} tokens, {cp} ranks: {np.mean(balance):.4f}, worst {max(balance):.4f}")
    print(f"zigzag: {np.mean(zigzags):.2f}")
    assert max(balance) <= SLOWEST_OVER_MEAN
    assert np.mean(zigzags) > 1.1  # what there is to win


@pytest.mark.parametrize("tokens", [6000, 8190])
def test_blocks_are_nearly_as_long_as_asked_where_they_do_not_divide(tokens: int) -> None:
    """Of the largest size that divides a rank's tokens there could be thousands."""
    split = balanced(Segments.of([tokens]), cp=3)
    each = split.parts[0].tokens
    assert each == tokens // 3
    assert max(len(part.starts) for part in split.parts) <= -(-each // BLOCK)
    assert slowest_over_mean(split, Segments.of([tokens])) <= SLOWEST_OVER_MEAN


def test_equal_blocks_go_to_ranks_in_their_order() -> None:
    """Ties are common, and all ranks have to come to one split."""
    split = balanced(Segments.of([4] * 8), cp=4, block=4)
    assert [part.starts.tolist() for part in split.parts] == [[0, 16], [4, 20], [8, 24], [12, 28]]


def test_a_million_tokens_are_planned_in_a_few_milliseconds() -> None:
    """Plain Python adds up 48,000 numbers in one; a heap of all blocks takes six times that."""
    segments = pack(1 << 20, median=4000, spread=1.2)
    slower = times_slower(lambda: balanced(segments, cp=8), lambda: sum(range(48_000)), turns=30)
    print(f"{slower:.2f} times plain work")
    assert slower < 3
