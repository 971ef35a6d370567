"""Core attention of a rank that holds a part of each row."""

from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.layers.attention import SDPAttention, check_no_masks, is_causal
from loongplug.models.layers.context.gathered import attend_gathered
from loongplug.models.layers.context.ring import attend_in_ring
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.inputs import PackedLayout, PackedSegments

CommType = Literal["all_gather", "a2a", "p2p"]


class ContextAttention(SDPAttention):
    """SDPAttention of which each context parallel rank has a part of the row's tokens.

    Any number of ranks, any split of the tokens, rows of one segment or packs. Each rank's
    ``packed_seq_params`` carry the row (:class:`ContextRow`), whose split says which tokens of
    the row query, key and value are of.

    ``cp_comm_type`` says how ranks come by keys and values: "all_gather" (where none is given),
    "a2a" or "p2p". All ranks of the context parallel group have to call forward and backward
    in one order.

    Raises ValueError at construction for what SDPAttention refuses, another ``cp_comm_type``,
    dropout, and with "a2a" where the ranks do not divide the key/value heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )
        self._group = pg_collection.cp
        self.comm_type = cast(CommType, cp_comm_type or "all_gather")
        self._check_communication()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend over the whole row.

        Args:
            query: [s, b, heads, dim], or [s, heads, dim] when packed; s are this rank's tokens.
            key, value: [s, b, groups, dim], or [s, groups, dim] when packed.
            attention_mask: must be None.
            attn_mask_type: overrides the constructor's; must be a causal one.
            attention_bias: must be None.
            packed_seq_params: carry the row; "thd" when packed, "sbhd" else.

        Returns:
            [s, b, heads * dim], or [s, heads * dim] when packed, in query's dtype.

        Raises:
            ValueError: for a mask, a bias, a mask type that is not causal, and without a row, or
                with one of which this rank holds another number of tokens.
        """
        check_no_masks(attention_mask, attention_bias)
        check_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        row = row_of(packed_seq_params, tokens=query.size(0))
        if query.dim() == 4:
            return self._attend_row(query, key, value, row).flatten(2)
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return self._attend_row(query, key, value, row).flatten(1)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, row: ContextRow) -> Tensor:
        """[s, b, heads, dim] x 3 -> [s, b, heads, dim]."""
        if self.comm_type == "a2a":

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self._whole_row(q, k, v, row)

            return attend_by_heads(query, key, value, attend, row=row, group=self._group)
        attend_part = attend_gathered if self.comm_type == "all_gather" else attend_in_ring
        return attend_part(query, key, value, row=row, group=self._group, scale=self.softmax_scale)

    def _whole_row(self, query: Tensor, key: Tensor, value: Tensor, row: ContextRow) -> Tensor:
        """SDPAttention of some heads for all tokens of a row, [length, b, heads, dim]."""
        b, heads = query.shape[1:3]
        layout = PackedLayout.of(row.segments.lengths * b)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(q, k, v, layout, causal=True)  # [b * length, heads * dim]
        return out.unflatten(0, (b, -1)).transpose(0, 1).unflatten(2, (heads, -1))

    def _check_parallel(self, config: TransformerConfig) -> None:
        """Nothing: ranks that share a row are what this attention is for."""

    def _check_communication(self) -> None:
        """Raises ValueError for what no way of communication, or not this one, can do."""
        if self.comm_type not in get_args(CommType):
            raise ValueError(
                f"cp_comm_type is {self.comm_type!r}, and ContextAttention knows "
                f"{', '.join(get_args(CommType))}: use one of them."
            )
        if self.dropout:
            raise ValueError(
                f"attention_dropout is {self.dropout}, and ContextAttention has none: use 0."
            )
        ranks = self._group.size()
        if self.comm_type == "a2a" and self.num_groups % ranks:
            raise ValueError(
                f"cp_comm_type is 'a2a' with {self.num_groups} key/value heads on each of {ranks} "
                "context parallel ranks, which have to divide them: use 'all_gather'."
            )


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    row: ContextRow,
    group: dist.ProcessGroup,
) -> Tensor:
    """``--cp-comm-type a2a``: each rank computes its share of the heads for all tokens of a row.

    Two all-to-alls of equal pieces over ``group``, and two in the backward; differentiable.

    Args:
        query: [s, b, heads, dim], this rank's tokens.
        key, value: [s, b, groups, dim]; ``group`` divides the groups.
        attend: the attention of a whole row: query [length, b, heads / ranks, dim] and key and
            value likewise, in the order of the row, to [length, b, heads / ranks, dim].

    Returns:
        [s, b, heads, dim].
    """
    by_rank = [x.unflatten(2, (row.ranks, -1)) for x in (query, key, value)]
    sent = torch.cat(by_rank, dim=3).movedim(2, 0)  # [ranks, s, b, heads of q, k and v, dim]
    received = all_to_all(group, sent.flatten(0, 1))
    whole = received.index_select(0, row.back)
    out = attend(*whole.split([x.size(3) for x in by_rank], dim=2))
    by_heads = all_to_all(group, out.index_select(0, row.order))
    return by_heads.unflatten(0, (row.ranks, -1)).movedim(0, 2).flatten(2, 3)


def check_causal(mask_type: AttnMaskType) -> None:
    """Raises ValueError for full attention, which no split of rows here is for."""
    if not is_causal(mask_type):
        raise ValueError(
            "ContextAttention got full attention, and splits rows of causal attention only: "
            "use a causal attn_mask_type, or context_parallel_size 1."
        )


def row_of(params: PackedSeqParams | None, *, tokens: int) -> ContextRow:
    """The row that ``params`` carry, of which this rank holds so many ``tokens``.

    Raises ValueError where they carry none, or one of which it holds another number.
    """
    if not isinstance(params, PackedSegments) or params.context is None:
        raise ValueError(
            "ContextAttention got no row that says which tokens this rank holds: pass "
            "packed_seq_params of PackedSegments with a context."
        )
    row = params.context
    if row.tokens != tokens:
        raise ValueError(
            f"ContextAttention got {tokens} tokens of a row of which this rank holds "
            f"{row.tokens}; packed_seq_params must describe this very batch."
        )
    return row
