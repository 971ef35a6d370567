"""Packed attention by torch's kernel for segments of any lengths: what it is asked."""

import math
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layer_configs import ALONE, decoder_config
from megatron.core.transformer.enums import AttnMaskType
from on_a_gpu import in_fresh_interpreter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from loongplug.models.layers import attention as attention_module
from loongplug.models.layers.attention import SDPAttention
from loongplug.models.layers.inputs import pack_segments
from loongplug.platform.torch_kernels import varlen_attention

pytestmark = pytest.mark.quick

HEADS, DIM = 4, 8
LENGTHS = (5, 1, 9, 5)
MASKS = pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])


def attention(
    mask: AttnMaskType, *, groups: int, host: bool = False, scale: float | None = None
) -> SDPAttention:
    with patch.object(attention_module, "is_host", return_value=host):
        return SDPAttention(
            decoder_config(num_query_groups=groups),
            layer_number=1,
            attn_mask_type=mask,
            attention_type="self",
            softmax_scale=scale,
            pg_collection=ALONE,
        )


def drawn(groups: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(groups)
    return [
        torch.randn(sum(LENGTHS), heads, DIM, generator=generator).to(device, dtype)
        for heads in (HEADS, groups, groups)
    ]


def by_words(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's documentation says of ``varlen_attn``, segment by segment."""
    left, right = window_size
    assert (left, right) != (-1, -1)  # which cuDNN would take
    assert enable_gqa or query.shape == key.shape
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    found = []
    ends = cu_seq_q.tolist()
    assert ends == cu_seq_k.tolist()
    for start, end in pairwise(ends):
        assert end - start <= min(max_q, max_k)
        q, k, v = (x[start:end] for x in (query, key, value))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or 1 / math.sqrt(q.size(-1)))
        ahead = torch.arange(len(k)) - torch.arange(len(q)).unsqueeze(1)
        seen = (ahead <= right) & (ahead >= (-left if left >= 0 else -len(q)))
        scores = scores.masked_fill(~seen, float("-inf"))
        found.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v))
    return torch.cat(found)


@MASKS
@GROUPS
@pytest.mark.parametrize("scale", [None, 0.7])
def test_it_is_asked_for_what_the_loop_computes(
    mask: AttnMaskType, groups: int, scale: float | None
) -> None:
    params = pack_segments(LENGTHS, device="cpu")
    tensors = drawn(groups)
    expected = attention(mask, groups=groups, host=True, scale=scale)(
        *tensors, None, packed_seq_params=params
    )
    by_kernel = attention(mask, groups=groups, scale=scale)
    by_kernel._varlen = by_words
    with patch.object(SDPAttention, "_by_kernel", return_value=True):
        found = by_kernel(*tensors, None, packed_seq_params=params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_it_is_called_by_its_schema_where_it_serves() -> None:
    """In an interpreter of its own: ranks are not forked where tensors are said to be CUDA's."""
    in_fresh_interpreter(__file__, "asks_without_a_gpu", device="cpu")


def asks_without_a_gpu() -> None:
    """On tensors without values, of a device that need not be there."""
    if varlen_attention() is None:
        return
    for mask in (AttnMaskType.causal, AttnMaskType.no_mask):
        for groups in (1, 2, 4):
            by_kernel = attention(mask, groups=groups)
            with FakeTensorMode():
                _asked(by_kernel, groups=groups)
    changes: list[tuple[str, Any, torch.dtype]] = [
        ("_varlen", None, torch.bfloat16),
        ("dropout", 0.1, torch.bfloat16),
        ("dropout", 0.0, torch.float32),
    ]
    for name, value, dtype in changes:
        module = attention(AttnMaskType.causal, groups=2)
        setattr(module, name, value)
        layout = pack_segments(LENGTHS, device="cpu").layout
        assert layout is not None
        with FakeTensorMode():
            query, *_ = drawn(2, dtype=dtype, device="cuda")
            assert not module._by_kernel(query, layout), name
    _older_one_is_not_used()


def _asked(by_kernel: SDPAttention, *, groups: int) -> None:
    params = pack_segments(LENGTHS, device="cpu")
    ends = params.cu_seqlens_q
    assert ends is not None
    params.cu_seqlens_q = params.cu_seqlens_kv = ends.to("cuda")
    tensors = [x.requires_grad_() for x in drawn(groups, dtype=torch.bfloat16, device="cuda")]
    with patch.object(SDPAttention, "_packed", side_effect=AssertionError("the loop")):
        out = by_kernel(*tensors, None, packed_seq_params=params)
    assert (out.shape, out.dtype) == ((sum(LENGTHS), HEADS * DIM), torch.bfloat16)


def _older_one_is_not_used() -> None:
    from torch.nn.attention import varlen

    def varlen_attn(query: Any, key: Any, value: Any, is_causal: bool = False) -> None:
        """As torch had it first."""

    with patch.object(varlen, "varlen_attn", varlen_attn):
        assert varlen_attention() is None


def test_gpus_that_have_no_such_kernels_are_not_asked() -> None:
    if varlen_attention() is None:
        pytest.skip("this torch has none")
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.get_device_capability", return_value=(7, 5)) as capability,
    ):
        assert varlen_attention() is None
        capability.return_value = (8, 0)
        assert varlen_attention() is not None


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    in_fresh_interpreter(__file__, "agrees_on_a_gpu")


def agrees_on_a_gpu() -> None:
    """Values and gradients of the kernel, and the loop's in fp32."""
    for mask in (AttnMaskType.causal, AttnMaskType.no_mask):
        for groups in (1, 2, 4):
            params = pack_segments(LENGTHS, device="cuda")
            found = []
            for dtype in (torch.float32, torch.bfloat16):
                tensors = [x.requires_grad_() for x in drawn(groups, dtype=dtype, device="cuda")]
                module = attention(mask, groups=groups)
                layout = params.layout
                assert layout is not None
                assert module._by_kernel(tensors[0], layout) == (dtype == torch.bfloat16)
                out = module(*tensors, None, packed_seq_params=params)
                weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
                grads = torch.autograd.grad((out.float() * weights).sum(), tensors)
                found.append([out.float(), *(each.float() for each in grads)])
            for exact, rounded in zip(*found, strict=True):
                assert (exact - rounded).abs().max() <= 0.03 * exact.abs().max()
