"""Core attention of a rank that holds a part of each row."""

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.layers.attention import SDPAttention, is_causal
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
        """Attend over the whole row, of which the operands have this rank's tokens.

        Shapes are those of :class:`SDPAttention`. ``packed_seq_params`` carry the row.
        """
        assert attention_mask is None, "no S x S matrix to apply it to"
        assert attention_bias is None, "no S x S matrix to add it to"
        assert is_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
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

    Two all-to-alls of equal pieces over ``group``, and two in the backward; differentiable. Query
    and result are [s, b, heads, dim], of this rank's tokens; ``attend`` is given all tokens of the
    row in their order, [length, b, heads / ranks, dim], and gives as much.
    """
    by_rank = [x.unflatten(2, (row.ranks, -1)) for x in (query, key, value)]
    sent = torch.cat(by_rank, dim=3).movedim(2, 0)  # [ranks, s, b, heads of q, k and v, dim]
    received = all_to_all(group, sent.flatten(0, 1))
    whole = received.index_select(0, row.back)
    out = attend(*whole.split([x.size(3) for x in by_rank], dim=2))
    by_heads = all_to_all(group, out.index_select(0, row.order))
    return by_heads.unflatten(0, (row.ranks, -1)).movedim(0, 2).flatten(2, 3)


def row_of(params: PackedSeqParams | None, *, tokens: int) -> ContextRow:
    """The row that ``params`` carry, of which this rank holds so many ``tokens``."""
    assert isinstance(params, PackedSegments), params
    row = params.context
    assert row is not None, "no row that says which tokens this rank holds"
    assert row.tokens == tokens, "packed_seq_params must describe this very batch"
    return row
