"""Rotary position embedding from a table that all layers share."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from loongplug.models.layers.by_heads import by_heads


def rope_table(angles: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of rotary ``angles``, in the form RotarySelfAttention takes.

    Args:
        angles: [s, b or 1, 1, dim / 2] float32, one angle per pair of channels (channel i turns
            with channel i + dim / 2); for a packed batch s = t and b = 1.
        dtype: the dtype the rotation is computed in.

    Returns:
        [s, b or 1, 1, 2 * dim]: cos, cos, -sin, sin. It is one tensor so that it passes through
        recompute and schedules wherever Megatron carries a ``rotary_pos_emb``.
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn ``x`` [s, b, heads, dim] by ``table`` [s, b or 1, 1, 2 * dim]; x's shape and dtype."""
    dim = x.size(-1)
    if table.size(-1) != 2 * dim:
        raise ValueError(
            f"A rope table of width {table.size(-1)} met heads of {dim} channels; it must be "
            f"{2 * dim} wide. Make it with loongplug.models.layers.rope.rope_table from "
            f"{dim // 2} angles."
        )
    cos, sin = table.split(dim, dim=-1)
    # roll by half swaps the halves; the table's sines carry the sign.
    turned = torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
    return turned.to(x.dtype)


class RotarySelfAttention(SelfAttention):
    """Megatron's SelfAttention with ``rotary_pos_emb`` read as a :func:`rope_table`.

    Upstream takes the cosine and sine of the angles again in every layer and, for packed input,
    walks the segments on the host. Here the table is made once per microbatch, already in the
    order of the tokens, so that packed input needs neither.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As upstream, with ``rotary_pos_emb`` a table [s, b or 1, 1, 2 * dim] or None."""
        # Upstream hands key_value_states untouched to get_query_key_value_tensors, where
        # self-attention has no use for it: that is how the table gets there.
        return super().forward(
            hidden_states, attention_mask, key_value_states=rotary_pos_emb, **options
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Query [s, b, heads, dim], key and value [s, b, groups, dim]; query and key turned."""
        table = key_value_states
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, None, **options)
        if table is not None:
            query, key = _turned(query, table), _turned(key, table)
        return (query, key, *rest)


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """As :func:`rotate`, laid out as the host's attention wants it."""
    if x.device.type != "cpu":
        return rotate(x, table)
    by_head = by_heads(x.permute(1, 2, 0, 3))  # [b, heads, s, dim]
    return rotate(by_head, table.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
