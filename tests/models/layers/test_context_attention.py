"""ContextAttention on ranks that each hold a part of a row, against SDPAttention of one rank."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layer_configs import ALONE, decoder_config
from megatron.core.transformer.enums import AttnMaskType
from ranks import run_ranks
from torch import Tensor

from loongplug.context.balance import balanced
from loongplug.context.segments import Segments
from loongplug.context.token_split import TokenSplit, zigzag
from loongplug.models.layers.attention import SDPAttention
from loongplug.models.layers.context import gathered, tile_attention
from loongplug.models.layers.context.attention import ContextAttention
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.inputs import PackedSegments, pack_segments

HEADS, GROUPS, DIM = 24, 12, 8
COMM_TYPES = ("all_gather", "a2a", "p2p")
# Key/value heads that come at once; those of short rows are all of them.
AT_ONCE = {"all_gather, one by one": 1, "all_gather, five at once": 5}
TOLERANCE = 2e-6
# Gradients of two tokens nearly cancel: of one rank alone they are off by 1.1e-6.
OF_FEW_TOKENS = 4e-6

# Lengths of a row's segments, rows, and the most tokens of a block; None is a zigzag.
ROWS: dict[str, tuple[list[int], int, int | None]] = {
    "one row": ([48], 1, None),
    "two rows": ([48], 2, None),
    "two rows of blocks": ([48], 2, 4),
    "a length that does not divide": ([47], 2, None),
    "a pack": ([20, 1, 13, 1, 1, 12], 1, None),
    "a balanced pack": ([20, 1, 13, 1, 1, 12], 1, 5),
    "a pack of equal segments": ([8] * 6, 1, None),
    "a rank with padding only": ([9, 3], 1, None),
    "fewer tokens than ranks": ([1], 1, None),
}
PADDED_TO = {"a rank with padding only": 48}


def split_of(name: str, *, cp: int) -> TokenSplit:
    lengths, _, block = ROWS[name]
    row = Segments.of(lengths, padded_to=PADDED_TO.get(name))
    return zigzag(row.length, cp=cp) if block is None else balanced(row, cp=cp, block=block)


def drawn(length: int, rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value, [length, rows, heads, dim], and the output's gradient."""
    generator = torch.Generator().manual_seed(length + rows)
    query, key, value, grad = (
        torch.randn(length, rows, heads, DIM, generator=generator).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    return [query, key, value, grad.flatten(2)]


def attention(*, cp: int = 1, **options: Any) -> SDPAttention:
    config = decoder_config(
        num_attention_heads=HEADS, num_query_groups=GROUPS, context_parallel_size=cp
    )
    which, groups = SDPAttention, ALONE
    if cp > 1 or "cp_comm_type" in options:
        which = ContextAttention
        groups = SimpleNamespace(tp=ALONE.tp, cp=dist.group.WORLD)
    return which(config, 1, AttnMaskType.causal, "self", pg_collection=groups, **options)


def of_one_rank(name: str, *, cp: int) -> list[Tensor]:
    """Output and gradients of the padded row in float64, on one rank."""
    lengths, rows, _ = ROWS[name]
    length = split_of(name, cp=cp).length
    query, key, value, grad = drawn(length, rows, torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    packed = pack_segments(lengths, device="cpu", padding=length - sum(lengths))
    outs = [
        attention()(*(x[:, row] for x in leaves), None, packed_seq_params=packed)
        for row in range(rows)
    ]
    out = torch.stack(outs, dim=1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def of_this_rank(
    name: str, comm_type: str, *, rank: int, cp: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Output and gradients of this rank's tokens."""
    lengths, rows, _ = ROWS[name]
    split = split_of(name, cp=cp)
    row = context_row(split, lengths, rank=rank, device="cpu")
    packed = len(lengths) > 1
    mine = torch.from_numpy(split.parts[rank].places)
    query, key, value, grad = (x[mine] for x in drawn(split.length, rows, dtype))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    given = [x.squeeze(1) for x in leaves] if packed else leaves
    params = PackedSegments(qkv_format="thd" if packed else "sbhd", context=row)
    module = attention(cp=cp, cp_comm_type=comm_type)
    out = module(*given, None, packed_seq_params=params)
    assert out.shape == (*given[0].shape[:-2], HEADS * DIM)
    grads = torch.autograd.grad(out, leaves, grad.squeeze(1) if packed else grad)
    return [out.detach().reshape(grad.shape), *grads]


@contextmanager
def at_once(heads: int) -> Iterator[None]:
    """All rows' key/value heads are gathered by so many."""
    with patch.object(gathered, "_heads_at_once", lambda *_: heads):
        yield


def _every_row(rank: int, cp: int) -> dict[tuple[str, str], list[Tensor]]:
    found = {
        (name, comm_type): of_this_rank(name, comm_type, rank=rank, cp=cp)
        for name in ROWS
        for comm_type in COMM_TYPES
    }
    for way, heads in AT_ONCE.items():
        with at_once(heads):
            found |= {
                (name, way): of_this_rank(name, "all_gather", rank=rank, cp=cp) for name in ROWS
            }
    return found


def error(found: list[list[Tensor]], expected: list[Tensor], split: TokenSplit) -> float:
    """The largest difference of any output or gradient, over the largest of its values."""
    worst = 0.0
    order = torch.from_numpy(split.order)
    for parts, theirs in zip(zip(*found, strict=True), expected, strict=True):
        ours = torch.cat(parts).double()
        difference = (ours - theirs[order]).abs().max() / theirs.abs().max().clamp(min=1)
        worst = max(worst, float(difference))
    return worst


@pytest.mark.parametrize("cp", [1, pytest.param(3, marks=pytest.mark.quick), 4])
def test_ranks_together_compute_what_one_rank_does(cp: int) -> None:
    by_rank = run_ranks(_every_row, cp, cp=cp)
    errors = {}
    for name, comm_type in by_rank[0]:
        found = [results[name, comm_type] for results in by_rank]
        split = split_of(name, cp=cp)
        errors[name, comm_type] = error(found, of_one_rank(name, cp=cp), split)
    print(f"{cp} ranks: {max(errors.values()):.1e}")
    allowed = dict.fromkeys(ROWS, TOLERANCE) | {"fewer tokens than ranks": OF_FEW_TOKENS}
    assert {which: each for which, each in errors.items() if not each <= allowed[which[0]]} == {}


def _in_bfloat16(rank: int, cp: int) -> dict[str, list[Tensor]]:
    name, dtype = "a pack", torch.bfloat16
    found = {each: of_this_rank(name, each, rank=rank, cp=cp, dtype=dtype) for each in COMM_TYPES}
    assert all(x.dtype == dtype for results in found.values() for x in results)
    return found


def test_bfloat16_agrees_within_its_rounding() -> None:
    by_rank = run_ranks(_in_bfloat16, 2, cp=2)
    split, expected = split_of("a pack", cp=2), of_one_rank("a pack", cp=2)
    for comm_type in COMM_TYPES:
        assert error([each[comm_type] for each in by_rank], expected, split) < 2e-2


def _watched(rank: int, cp: int) -> tuple[list[str], int]:
    """What happens in a forward and a backward, and how many elements come from other ranks."""
    events: list[str] = []
    received = 0

    def noting(name: str, call: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            nonlocal received
            events.append(name)
            if name in ("gather", "return"):
                received += args[0].numel() * (cp - 1) // cp
            return call(*args, **options)

        return patch.object(*WATCHED[name], noted)

    with ExitStack() as stack:
        for name, (owner, place) in WATCHED.items():
            stack.enter_context(noting(name, getattr(owner, place)))
        stack.enter_context(at_once(1))
        of_this_rank("two rows", "all_gather", rank=rank, cp=cp)
    return events, received


WATCHED = {
    "gather": (dist, "all_gather_into_tensor"),
    "return": (dist, "all_to_all_single"),
    "compute": (tile_attention, "attend"),
    "derive": (tile_attention, "attend_backward"),
}


def test_the_next_heads_keys_are_asked_for_before_one_is_computed() -> None:
    events, received = run_ranks(_watched, 2, cp=2)[0]
    # A head's tiles count as one; the last head of a forward follows without a gather.
    heads = [
        name
        for before, name in pairwise(["", *events])
        if name != before or name in ("gather", "return")
    ]
    forward = ["gather", *["gather", "compute"] * (GROUPS - 1)]
    backward = ["gather", *["gather", "derive", "return"] * (GROUPS - 1), "derive", "return"]
    assert heads == forward + backward
    # Keys and values twice, their gradients once, each but for the half that is this rank's own.
    assert received == 6 * 48 * 2 * GROUPS * DIM // 2
