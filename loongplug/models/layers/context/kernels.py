"""Attention of one tile with its logsumexp, by torch's own kernels.

A query's keys may be spread over several tiles. The logsumexp of its scores in each is what
their results are merged by. Given the logsumexp and the output over *all* of a query's keys, a
tile's backward gives exactly the tile's part of the gradients.
"""

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


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys, all of them, or with ``causal`` key i for queries from i.

    ``q`` is [b, heads, s_q, dim], ``k`` and ``v`` are [b, groups, s_k, dim]; neighbouring heads
    share a group. Causal, there are as many queries as keys. Neither s_q nor s_k may be 0: torch's
    kernel would end the process. A ``scale`` of None is 1 / sqrt(dim).

    Returns:
        The output [b, heads, s_q, dim] in q's dtype, and the logsumexp of the scaled scores
        [b, heads, s_q] in float32, of float64, which CPUs alone take, in float64.
    """
    assert min(q.size(2), k.size(2)) > 0, "an empty tile"
    if is_computed_on_host(q):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    assert q.dtype != torch.float64, "no flag asks for it, and no kernel here takes it"
    scale, channels = _scale_if_padded(q, scale), q.size(-1)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if q.dtype == torch.float32:
        out, lse = _efficient(q, *_for_each_head(q, k, v), causal=causal, scale=scale)
    else:
        out, lse = _flash(q, k, v, causal=causal, scale=scale)
    return out[..., :channels], lse


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

    ``out`` and ``lse`` are of these queries over all keys that they see, in this tile or elsewhere,
    and ``grad`` is the gradient of ``out``; the others as in :func:`attend`.
    """
    assert min(q.size(2), k.size(2)) > 0, "an empty tile"
    lse = lse.contiguous()
    if is_computed_on_host(q):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    scale, channels = _scale_if_padded(q, scale), q.size(-1)
    grad, q, k, v, out = (_aligned(each) for each in (grad, q, k, v, out))
    if q.dtype == torch.float32:
        of_head = _for_each_head(q, k, v)
        dq, *of_heads = _efficient_backward(grad, q, *of_head, out, lse, causal=causal, scale=scale)
        dk, dv = (each.unflatten(1, (k.size(1), -1)).sum(2) for each in of_heads)
    else:
        dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
    return dq[..., :channels], dk[..., :channels], dv[..., :channels]


def _for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each head of ``q``, which the memory-efficient kernel wants."""
    times = q.size(1) // k.size(1)
    return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


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


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(None, None, q.size(2), k.size(2)),
        *(0.0, causal, False),
        scale=scale,
    )
    return out.transpose(1, 2), lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    no_seed = lse.new_empty(2, dtype=torch.uint64)  # nothing is dropped
    no_offset = lse.new_empty((), dtype=torch.uint64)
    found = _aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
        *(lse, None, None, q.size(2), k.size(2)),
        *(0.0, causal, no_seed, no_offset),
        scale=scale,
    )
    return tuple(each.transpose(1, 2) for each in found)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._efficient_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(None, None, None, None, None),
        *(0.0, _CAUSAL_FROM_TOP_LEFT if causal else 0, True),
        scale=scale,
    )
    return out.transpose(1, 2), lse[..., : q.size(2)]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    # Behind the last query, as the kernel itself leaves it: a weight of exp(score - inf) = 0.
    lse = pad(lse, (0, -lse.size(-1) % _LSE_ALIGNED_TO), value=float("inf"))
    nothing_dropped = lse.new_zeros((), dtype=torch.int64)
    *found, _ = _aten._efficient_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v)),
        None,
        out.transpose(1, 2),
        *(None, None, q.size(2), k.size(2), lse),
        *(0.0, nothing_dropped, nothing_dropped),
        *(_CAUSAL_FROM_TOP_LEFT if causal else 0, False),
        scale=scale,
    )
    return tuple(each.transpose(1, 2) for each in found)
