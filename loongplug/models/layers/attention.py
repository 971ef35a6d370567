"""Self-attention with a table of rope, and its core on torch's ``scaled_dot_product_attention``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor

from loongplug.models.layers.inputs import PackedLayout, layout_of
from loongplug.platform.active import is_host
from loongplug.platform.devices import is_computed_on_host
from loongplug.platform.torch_kernels import HEAD_ALIGNMENT, WIDEST_HEAD, varlen_attention

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_FULL = (AttnMaskType.no_mask, AttnMaskType.padding)
_HALF = (torch.bfloat16, torch.float16)  # what torch's kernel for segments of any lengths takes


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn ``x`` [s, b, heads, dim] by ``table`` [s, b or 1, 1, 2 * dim]; x's shape and dtype."""
    dim = x.size(-1)
    cos, sin = table.split(dim, dim=-1)
    # roll by half swaps the halves; the table's sines carry the sign.
    turned = torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
    return turned.to(x.dtype)


class RotarySelfAttention(SelfAttention):
    """Megatron's SelfAttention with ``rotary_pos_emb`` read as a ``layers.inputs.rope_table``.

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


def by_heads(x: Tensor) -> Tensor:
    """``x`` [batch, heads, s, dim] with a head's rows behind each other, where work is the host's.

    Megatron's layers have a token's batch and heads side by side, so that the rows of a head lie
    pages apart and share a few lines of the cache. A kernel of the host goes over them for every
    block of queries; one copy costs less. CUDA's kernels read either, and get what there is. An
    estimate's tensors, which have no values, lie as those of the run's device would.
    """
    if not is_computed_on_host(x) or x.stride(-2) == x.size(-1):
        return x
    return x.contiguous()


def own_draws(*, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Inside, each tensor parallel rank draws for itself, for a dropout.

    With sequence parallelism Megatron's blocks have entered that state for all their layers. To
    enter it once more would draw the same numbers, but leave a copy of it behind from which a
    recompute, which runs outside of the block, would go on: with other draws than the forward's.
    """
    if sequence_parallel:
        return nullcontext()
    return get_cuda_rng_tracker().fork()


class SDPAttention(MegatronModule):
    """Drop-in for Megatron's DotProductAttention that holds no S x S matrix.

    The mask is causal or full by ``attn_mask_type`` (the one given to ``forward``, else the
    constructor's); padding types are taken as "no padding here", since no mask tensor is
    accepted. Grouped-query attention reads each key/value head in place. With packed ``thd``
    parameters every segment attends to itself only: in half precision on CUDA by torch's kernel for
    segments of any lengths, elsewhere by one call for each length that there is.

    No collectives: each tensor-parallel rank computes its own heads. The softmax runs in at
    least float32 inside the kernel, which makes ``apply_query_key_layer_scaling`` (divide by the
    layer number, multiply back within the softmax) an identity here.

    Only with dropout, for which torch has no fused kernel on the CPU, the matrix is there again.
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
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        tp = pg_collection.tp.size()
        self.num_heads = divide(config.num_attention_heads, tp)
        self.num_groups = divide(config.num_query_groups, tp)
        self.softmax_scale = softmax_scale  # None: SDPA's 1 / sqrt(head dim), Megatron's too
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._varlen = None if is_host() else varlen_attention()

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
        """Attend: query, key and value are [s, b, heads or groups, dim], or [t, ...] when packed.

        Heads and groups are this rank's; ``attn_mask_type`` overrides the constructor's. Gives
        [s, b, heads * dim], or [t, heads * dim] when packed, in query's dtype; without tokens an
        empty result that is still joined to the graph.
        """
        assert attention_mask is None, "no S x S matrix to apply it to"
        assert attention_bias is None, "no S x S matrix to add it to"
        causal = is_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        if packed_seq_params is not None:
            layout = layout_of(packed_seq_params)
            if self._by_kernel(query, layout):
                return self._varlen_packed(query, key, value, packed_seq_params, causal=causal)
            return self._packed(query, key, value, layout, causal=causal)
        s_q, s_k = query.size(0), key.size(0)
        if s_q == 1 < s_k:  # a single query sees every key
            causal = False
        assert not causal or s_q == s_k, (s_q, s_k)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, dim]
        out = self._attend(q, k, v, causal=causal)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)  # [s, b, heads * dim]

    def _by_kernel(self, query: Tensor, layout: PackedLayout) -> bool:
        """Whether torch's kernel for segments of any lengths serves this batch."""
        assert query.size(0) == layout.tokens, "packed_seq_params must describe this very batch"
        return (
            self._varlen is not None
            and query.is_cuda
            and query.dtype in _HALF
            and query.size(-1) % HEAD_ALIGNMENT == 0
            and query.size(-1) <= WIDEST_HEAD
            and not (self.dropout and self.training)
            and bool(layout.groups)
        )

    def _varlen_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: PackedSeqParams,
        *,
        causal: bool,
    ) -> Tensor:
        """All segments in one call; [t, heads, dim] -> [t, heads * dim].

        A window that sees all keeps torch from taking cuDNN, forward and backward: it would make a
        plan for each other number of tokens, and keep them all.
        """
        assert self._varlen is not None
        longest = params.max_seqlen_kv
        out: Tensor = self._varlen(
            query,
            key,
            value,
            params.cu_seqlens_q,
            params.cu_seqlens_kv,
            params.max_seqlen_q,
            params.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1, 0) if causal else (longest, longest),
            enable_gqa=self.num_groups != self.num_heads,
        )
        return out.flatten(1)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, *, causal: bool
    ) -> Tensor:
        """One SDPA call for all segments of a length; [t, heads, dim] -> [t, heads * dim]."""
        if not layout.groups:
            # Zeros of no elements that still depend on all three inputs.
            return query.flatten(1) + 0 * (key.sum() + value.sum())
        if len(layout.groups) == 1:
            ((length, segments),) = layout.groups.items()
            q, k, v = (
                x.unflatten(0, (len(segments), length)).transpose(1, 2) for x in (query, key, value)
            )  # [segments, heads, length, dim]
            out = self._attend(q, k, v, causal=causal)
            return out.transpose(1, 2).reshape(query.size(0), -1)

        pieces = [x.split(layout.lengths) for x in (query, key, value)]
        outputs: list[Tensor] = [query.new_empty(0, query[0].numel())] * len(layout.lengths)
        for segments in layout.groups.values():
            q, k, v = (
                torch.stack([piece[i] for i in segments]).transpose(1, 2) for piece in pieces
            )  # [segments, heads, length, dim]
            out = self._attend(q, k, v, causal=causal).transpose(1, 2).flatten(2)
            for segment, rows in zip(segments, out.unbind(), strict=True):
                outputs[segment] = rows  # [length, heads * dim]
        return torch.cat(outputs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """[batch, heads, s, dim] x 3 -> [batch, heads, s, dim]."""
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so each has to draw for itself.
        draws = own_draws(sequence_parallel=self.config.sequence_parallel)
        with draws if dropout else nullcontext():
            return F.scaled_dot_product_attention(
                by_heads(q),
                by_heads(k),
                by_heads(v),
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=self.num_groups != self.num_heads,
            )


def is_causal(mask_type: AttnMaskType) -> bool:
    """Whether a mask type is causal, not full; no other kind is known here."""
    assert mask_type in _CAUSAL + _FULL, mask_type
    return mask_type in _CAUSAL
