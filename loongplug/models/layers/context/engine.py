"""Core attention beside TransformerEngine's linears, of a rank that holds a part of each row."""

from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from loongplug.models.layers.attention import is_causal
from loongplug.models.layers.context.attention import ContextAttention, row_of
from loongplug.models.layers.context.row import ContextRow

# Channels of a head that cuDNN and flash-attn take in every version. Where these do not serve,
# TransformerEngine computes in torch, and that takes whole rows only.
_ALIGNMENT, _WIDEST = 8, 128
_HALF = (torch.bfloat16, torch.float16)


@cache
def over_parts_of_rows(engine: type[nn.Module]) -> type[nn.Module]:
    """TransformerEngine's attention class, or one like it, for any split of rows."""
    return type("EngineContextAttention", (EngineContext, engine), {})


class EngineContext(nn.Module):
    """A first base beside TransformerEngine's attention: who computes which rows.

    That attention expects of each rank two chunks of a row that is one causal segment: number r of
    2 N equal ones from the front, and number r from the back. Such are padded rows, in half
    precision, and it gets them as rows without packed parameters. All others go to
    :class:`ContextAttention`: packs, rows that are split by cost, float32, wide heads. Which it is
    follows from the row, the dtype and the config, so that all ranks of the group do the same.

    It is a base, and no wrapper, so that checkpoints have the names of TransformerEngine's module.
    ContextAttention adds nothing to them. Collective in forward and backward: the context parallel
    group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        own = ContextAttention(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        super().__init__(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            cp_comm_type=own.comm_type,  # where none is given, the engine would take another
            pg_collection=pg_collection,
        )
        self.of_any_split = own
        self._by_kernel = config.attention_backend is not AttnBackend.unfused

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Any:
        """As :meth:`ContextAttention.forward`, whose arguments, result and errors it has."""
        row = row_of(packed_seq_params, tokens=query.size(0))
        if not self._expresses(query, row):
            return self.of_any_split(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )
        assert attention_mask is None
        assert attention_bias is None
        assert is_causal(attn_mask_type)
        # Padding stands behind all that counts: to the engine these are rows without any.
        return super().forward(query, key, value, None, attn_mask_type=AttnMaskType.causal)

    def _expresses(self, query: Tensor, row: ContextRow) -> bool:
        """Whether TransformerEngine has a kernel for such a row."""
        return (
            self._by_kernel
            and query.dim() == 4  # a pack has no batch
            and row.engine_order
            and query.dtype in _HALF
            and query.size(-1) % _ALIGNMENT == 0
            and query.size(-1) <= _WIDEST
        )
