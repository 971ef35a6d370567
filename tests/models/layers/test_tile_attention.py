"""Attention over a part's tiles, merged and added up, against the formula in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongplug.context.balance import balanced
from loongplug.context.segments import Segments
from loongplug.context.tiles import grouped, tiles
from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.context.tile_attention import Gradients, Merged

BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 8
TOLERANCE = 1e-13


def drawn(length: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and the output's gradient of a row; different in every entry."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def by_formula(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention of segments, with all scores written out."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    segment = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    mask = (segment[:, None] == segment).tril()
    scores = (q @ k.transpose(2, 3) / math.sqrt(DIM)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def assert_parts_agree(split: TokenSplit, segments: Segments, *, by_rank: bool) -> None:
    """Outputs and gradients of all parts together are those of the row.

    With ``by_rank`` keys come in one part after another, else as a whole row.
    """
    q, k, v, grad = drawn(split.length)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = by_formula(*leaves, segments.lengths)
    out, *grads = (torch.zeros_like(x) for x in (q, q, k, v))
    for rank, part in enumerate(split.parts):
        mine = torch.from_numpy(part.places)
        row = context_row(split, segments.lengths, rank=rank, device="cpu")
        if by_rank:
            ways = [
                (torch.from_numpy(keys.places), groups)
                for keys, groups in zip(split.parts, row.tiles_by_rank, strict=True)
            ]
        else:
            ways = [(torch.arange(split.length), row.tiles)]
        merged = Merged(q[:, :, mine], scale=None)
        for held, groups in ways:
            merged.add(k[:, :, held], v[:, :, held], groups)
        out[:, :, mine] = merged.out
        found = Gradients(
            grad[:, :, mine], q=q[:, :, mine], out=merged.out, lse=merged.lse, scale=None
        )
        for held, groups in ways:
            of_keys = found.add(k[:, :, held], v[:, :, held], groups)
            for total, share in zip(grads[1:], of_keys, strict=True):
                total[:, :, held] += share
        grads[0][:, :, mine] = found.q
    theirs = torch.autograd.grad(expected, leaves, grad)
    for ours, wanted in zip((out, *grads), (expected, *theirs), strict=True):
        assert (ours - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1)


@pytest.mark.quick
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 7),
    st.sampled_from(["zigzag", 1, 2, 3]),
    st.booleans(),
)
@settings(max_examples=60)
def test_parts_together_are_the_row(
    lengths: list[int], cp: int, how: str | int, by_rank: bool
) -> None:
    row = Segments.of(lengths)
    split = zigzag(row.length, cp=cp) if how == "zigzag" else balanced(row, cp=cp, block=int(how))
    assert_parts_agree(split, Segments.of(lengths, padded_to=split.length), by_rank=by_rank)


@pytest.mark.parametrize("by_rank", [False, True])
def test_equal_tiles_are_one_call_and_agree(by_rank: bool) -> None:
    lengths = [8] * 6
    split = zigzag(48, cp=3)
    segments = Segments.of(lengths)
    assert_parts_agree(split, segments, by_rank=by_rank)
    found = tiles(split.parts[0], split.parts[0], segments)
    assert len(grouped(found)) == 1 < len(found)


def test_bfloat16_is_merged_in_float32() -> None:
    q, k, v, grad = drawn(16, dtype=torch.bfloat16)
    split = zigzag(16, cp=2)
    row = context_row(split, [16], rank=0, device="cpu")
    merged = Merged(q[:, :, :8], scale=None)
    merged.add(k, v, row.tiles)
    out, lse = merged.out.to(q.dtype), merged.lse
    found = Gradients(grad[:, :, :8], q=q[:, :, :8], out=out, lse=lse, scale=None)
    dtypes = {x.dtype for x in (merged.out, lse, *found.add(k, v, row.tiles), found.q)}
    assert dtypes == {torch.float32}
