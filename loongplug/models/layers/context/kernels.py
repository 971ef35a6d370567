"""Attention of one tile with its logsumexp, by torch's own kernels.

A query's keys may be spread over several tiles. The logsumexp of its scores in each is what
their results are merged by. Given the logsumexp and the output over *all* of a query's keys, a
tile's backward gives exactly the tile's part of the gradients.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from loongplug.platform.devices import is_computed_on_host

_aten = torch.ops.aten

_CAUSAL_FROM_TOP_LEFT = 1  # torch's number of this mask in the memory-efficient kernel
_LSE_ALIGNED_TO = 32  # that kernel's rows of logsumexp
# Channels of a head: the flash kernel refuses others, and from sm80 on there is no memory-efficient
# one for what is not aligned to 16 bytes. torch's own attention pads before it calls these.
_CHANNELS_ALIGNED_TO = 8


@dataclass(frozen=True, slots=True)
class _Tile:
    """The operands and the mask of one kernel, as :func:`attend` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float | None

    def for_each_head(self) -> "_Tile":
        """The tile with keys and values once for each head of ``q``, which some kernels want."""
        times = self.q.size(1) // self.k.size(1)
        k, v = (x.repeat_interleave(times, dim=1) for x in (self.k, self.v))
        return replace(self, k=k, v=v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys, all of them, or with ``causal`` key i for queries from i.

    Args:
        q: [b, heads, s_q, dim].
        k, v: [b, groups, s_k, dim]; heads are a multiple of groups, and neighbouring heads share
            a group. Neither s_q nor s_k may be 0: torch's kernel would end the process.
        causal: takes as many queries as keys.
        scale: of the scores; None is 1 / sqrt(dim).

    Returns:
        The output [b, heads, s_q, dim] in q's dtype, and the logsumexp of the scaled scores
        [b, heads, s_q] in float32, of float64, which CPUs alone take, in float64.
    """
    assert min(q.size(2), k.size(2)) > 0, "an empty tile"
    if is_computed_on_host(q):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        assert q.dtype != torch.float64, "no flag asks for it, and no kernel here takes it"
        padded = _scale_if_padded(q, scale)
        tile = _Tile(_aligned(q), _aligned(k), _aligned(v), causal, padded)
        if q.dtype == torch.float32:
            out, lse = _efficient(tile.for_each_head())
        else:
            out, lse = _flash(tile)
        out = out[..., : q.size(-1)]
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's part of the gradients of ``q``, ``k`` and ``v``, in their shapes and dtypes.

    Args:
        grad: the gradient of ``out``.
        q, k, v, causal, scale: as in :func:`attend`.
        out, lse: of these queries over all keys that they see, in this tile or elsewhere.
    """
    assert min(q.size(2), k.size(2)) > 0, "an empty tile"
    lse = lse.contiguous()
    if is_computed_on_host(q):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        padded = _scale_if_padded(q, scale)
        tile = _Tile(_aligned(q), _aligned(k), _aligned(v), causal, padded)
        grad, out = _aligned(grad), _aligned(out)
        if q.dtype == torch.float32:
            dq, dk, dv = _efficient_backward(tile.for_each_head(), grad, out, lse)
            dk, dv = (_of_groups(each, k) for each in (dk, dv))
        else:
            dq, dk, dv = _flash_backward(tile, grad, out, lse)
        dq, dk, dv = (each[..., : q.size(-1)] for each in (dq, dk, dv))
    return dq, dk, dv


def _scale_if_padded(q: Tensor, scale: float | None) -> float | None:
    """The scale that a kernel is told once ``q`` has been padded, by whose channels None would go.

    None where nothing is padded: torch's shapes of the memory-efficient backward take no other.
    """
    if q.size(-1) % _CHANNELS_ALIGNED_TO == 0:
        return scale
    return float(q.size(-1) ** -0.5) if scale is None else scale


def _aligned(x: Tensor) -> Tensor:
    """``x`` with channels of zeros behind its own, as many as kernels want.

    They add nothing to a score, and the output and the gradients have zeros there.
    """
    missing = -x.size(-1) % _CHANNELS_ALIGNED_TO
    return pad(x, (0, missing)) if missing else x


def _of_groups(grad: Tensor, k: Tensor) -> Tensor:
    """The gradient of what :meth:`_Tile.for_each_head` gave, as that of ``k``."""
    return grad.unflatten(1, (k.size(1), -1)).sum(2)


def _flash(tile: _Tile) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (tile.q, tile.k, tile.v)),
        *(None, None, tile.q.size(2), tile.k.size(2)),
        *(0.0, tile.causal, False),
        scale=tile.scale,
    )
    return out.transpose(1, 2), lse


def _flash_backward(
    tile: _Tile, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = lse.new_empty(2, dtype=torch.uint64)  # nothing is dropped
    no_offset = lse.new_empty((), dtype=torch.uint64)
    dq, dk, dv = _aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, tile.q, tile.k, tile.v, out)),
        *(lse, None, None, tile.q.size(2), tile.k.size(2)),
        *(0.0, tile.causal, no_seed, no_offset),
        scale=tile.scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _efficient(tile: _Tile) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._efficient_attention_forward(
        *(x.transpose(1, 2) for x in (tile.q, tile.k, tile.v)),
        *(None, None, None, None, None),
        *(0.0, _CAUSAL_FROM_TOP_LEFT if tile.causal else 0, True),
        scale=tile.scale,
    )
    return out.transpose(1, 2), lse[..., : tile.q.size(2)]


def _efficient_backward(
    tile: _Tile, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # Behind the last query, as the kernel itself leaves it: a weight of exp(score - inf) = 0.
    lse = pad(lse, (0, -lse.size(-1) % _LSE_ALIGNED_TO), value=float("inf"))
    nothing_dropped = lse.new_zeros((), dtype=torch.int64)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(x.transpose(1, 2) for x in (grad, tile.q, tile.k, tile.v)),
        None,
        out.transpose(1, 2),
        *(None, None, tile.q.size(2), tile.k.size(2), lse),
        *(0.0, nothing_dropped, nothing_dropped),
        *(_CAUSAL_FROM_TOP_LEFT if tile.causal else 0, False),
        scale=tile.scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
