"""SDPAttention against the textbook formula and against Megatron's own attention."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_configs import ALONE, decoder_config
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers.attention import SDPAttention
from loongplug.models.layers.inputs import pack_segments

HEADS, GROUPS, DIM = 4, 2, 8


def attention(
    mask: AttnMaskType = AttnMaskType.causal,
    *,
    groups: int = GROUPS,
    softmax_scale: float | None = None,
    **config: Any,
) -> SDPAttention:
    return SDPAttention(
        decoder_config(num_query_groups=groups, **config),
        layer_number=3,
        attn_mask_type=mask,
        attention_type="self",
        softmax_scale=softmax_scale,
        pg_collection=ALONE,
    )


def inputs(*leading: int, groups: int = GROUPS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with the given leading sizes; different in every entry."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*leading, heads, DIM) for heads in (HEADS, groups, groups)]
    query, key, value = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in shapes
    )
    return query, key, value


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """softmax(q k' scale) v in float64, head by head; [s, b, ...] -> [s, b, heads * dim]."""
    query, key, value = query.double(), key.double(), value.double()
    heads = query.size(2)
    shared_by = heads // key.size(2)
    columns = []
    for head in range(heads):
        q, k, v = query[:, :, head], key[:, :, head // shared_by], value[:, :, head // shared_by]
        scores = torch.einsum("ibd,jbd->bij", q, k) * (scale or 1 / math.sqrt(DIM))
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        columns.append(torch.einsum("bij,jbd->ibd", scores.softmax(-1), v))
    return torch.cat(columns, dim=-1)


def assert_same(
    result: Tensor, expected: Tensor, tensors: tuple[Tensor, ...], *, tolerance: float = 2e-6
) -> None:
    """Value and gradients of a weighted sum agree."""
    assert result.shape == expected.shape
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad((result * weights).sum(), tensors)
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    for ours, theirs in zip((result, *grads), (expected, *expected_grads), strict=True):
        difference = (ours.double() - theirs.double()).abs().max()
        # of the order of one throughout; alone in its segment, a query has no gradient at all
        assert difference <= tolerance * theirs.abs().max().clamp(min=1), difference


@pytest.mark.quick
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_agrees_with_the_formula(mask: AttnMaskType, groups: int) -> None:
    tensors = inputs(7, 3, groups=groups)
    result = attention(mask, groups=groups)(*tensors, None)
    assert_same(result, by_formula(*tensors, causal=mask is AttnMaskType.causal), tensors)


@pytest.mark.quick
def test_softmax_scale_is_used_and_layer_scaling_changes_nothing() -> None:
    tensors = inputs(5, 2)
    scaled = attention(softmax_scale=0.9)(*tensors, None)
    assert_same(scaled, by_formula(*tensors, causal=True, scale=0.9), tensors)
    layered = attention(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    assert_same(layered(*tensors, None), by_formula(*tensors, causal=True), tensors)


@pytest.mark.quick
def test_the_mask_of_the_call_comes_before_the_constructors() -> None:
    tensors = inputs(6, 2)
    full = attention(AttnMaskType.causal)(*tensors, None, attn_mask_type=AttnMaskType.no_mask)
    assert_same(full, by_formula(*tensors, causal=False), tensors)
    causal = attention(AttnMaskType.padding)(
        *tensors, None, attn_mask_type=AttnMaskType.padding_causal
    )
    assert_same(causal, by_formula(*tensors, causal=True), tensors)


@pytest.mark.quick
def test_one_causal_query_sees_every_key() -> None:
    query, _, _ = inputs(1, 2)
    _, key, value = inputs(5, 2, seed=1)
    result = attention()(query, key, value, None)
    assert_same(result, by_formula(query, key, value, causal=False), (query, key, value))


@pytest.mark.quick
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=1, max_size=7).filter(any),
    causal=st.booleans(),
)
def test_packed_segments_attend_to_themselves_only(lengths: list[int], causal: bool) -> None:
    mask = AttnMaskType.padding_causal if causal else AttnMaskType.no_mask
    tensors = inputs(sum(lengths))
    result = attention(mask)(*tensors, None, packed_seq_params=pack_segments(lengths, device="cpu"))
    pieces = [
        by_formula(*(x[:, None] for x in segment), causal=causal)[:, 0]
        for segment in zip(*(x.split(lengths) for x in tensors), strict=True)
        if segment[0].size(0)
    ]
    assert_same(result, torch.cat(pieces), tensors)


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_give_no_rows_that_still_hang_in_the_graph(lengths: list[int]) -> None:
    tensors = inputs(0)
    result = attention()(*tensors, None, packed_seq_params=pack_segments(lengths, device="cpu"))
    assert result.shape == (0, HEADS * DIM)
    for tensor, grad in zip(tensors, torch.autograd.grad(result.sum(), tensors), strict=True):
        assert grad.shape == tensor.shape


@pytest.mark.quick
@pytest.mark.parametrize("packed", [None, [600, 424], [512, 512]])
def test_nothing_of_s_by_s_is_kept_for_backward(packed: list[int] | None) -> None:
    s = 1024
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    params = pack_segments(packed, device="cpu") if packed else None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention()(*(inputs(s) if packed else inputs(s, 1)), None, packed_seq_params=params)
    assert sizes
    assert max(sizes) <= s * HEADS * DIM


def _dropout_of_a_rank(rank: int, *, sequence_parallel: bool) -> list[float]:
    with model_parallel(tp=2):
        config = decoder_config(
            attention_dropout=0.5,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )
        module = SDPAttention(config, 1, AttnMaskType.causal, "self")
        query, key, value = (x[:, :, : x.size(2) // 2] for x in inputs(16, 2))
        # with sequence parallelism, the transformer block enters the tracker for all its layers
        block = get_cuda_rng_tracker().fork() if sequence_parallel else nullcontext()
        with block:
            first = module(query, key, value, None)
            assert not torch.equal(module(query, key, value, None), first)
        return list(first.flatten().tolist())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_drop_differently(sequence_parallel: bool) -> None:
    first, second = run_ranks(_dropout_of_a_rank, 2, sequence_parallel=sequence_parallel)
    assert first != second


@pytest.mark.quick
def test_bfloat16_agrees_with_the_formula_within_its_rounding() -> None:
    tensors = tuple(x.detach().bfloat16().requires_grad_() for x in inputs(12, 2))
    result = attention()(*tensors, None)
    assert result.dtype == torch.bfloat16
    assert_same(result, by_formula(*tensors, causal=True), tensors, tolerance=2e-2)
