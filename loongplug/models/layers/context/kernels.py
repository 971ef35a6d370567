"""Attention of one tile with its logsumexp, by torch's own kernels.

A query's keys may be spread over several tiles. The logsumexp of its scores in each is what
their results are merged by. Given the logsumexp and the output over *all* of a query's keys, a
tile's backward gives exactly the tile's part of the gradients.
"""

import torch
from torch import Tensor

from loongplug.platform.active import is_host

_aten = torch.ops.aten

_CAUSAL_FROM_TOP_LEFT = 1  # torch's number of this mask in the memory-efficient kernel
_LSE_ALIGNED_TO = 32  # that kernel's rows of logsumexp


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
        [b, heads, s_q] in float32, of float64 in float64.
    """
    assert min(q.size(2), k.size(2)) > 0, "an empty tile"
    if _by_cpu(q):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    elif q.dtype == torch.float32:
        out, lse = _efficient(q, _for_each_head(k, q), _for_each_head(v, q), causal, scale)
    else:
        out, lse = _flash(q, k, v, causal, scale)
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
    if _by_cpu(q):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif q.dtype == torch.float32:
        keys, values = _for_each_head(k, q), _for_each_head(v, q)
        dq, dk, dv = _efficient_backward(grad, q, keys, values, out, lse, causal, scale)
        dk, dv = (each.unflatten(1, (k.size(1), -1)).sum(2) for each in (dk, dv))
    else:
        dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, causal, scale)
    return dq, dk, dv


def _by_cpu(q: Tensor) -> bool:
    """Whether the CPU's kernel serves ``q``; one without values goes where the run's would."""
    return is_host() if q.is_meta else q.device.type != "cuda"


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each head of ``q``, which that kernel wants."""
    return x.repeat_interleave(q.size(1) // x.size(1), dim=1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
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
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = q.new_empty(2, dtype=torch.uint64)  # nothing is dropped
    no_offset = q.new_empty((), dtype=torch.uint64)
    dq, dk, dv = _aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
        *(lse, None, None, q.size(2), k.size(2)),
        *(0.0, causal, no_seed, no_offset),
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
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
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Behind the last query, as the kernel itself leaves it: a weight of exp(score - inf) = 0.
    lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % _LSE_ALIGNED_TO), value=float("inf"))
    nothing_dropped = q.new_zeros((), dtype=torch.int64)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v)),
        None,
        out.transpose(1, 2),
        *(None, None, q.size(2), k.size(2), lse),
        *(0.0, nothing_dropped, nothing_dropped),
        *(_CAUSAL_FROM_TOP_LEFT if causal else 0, False),
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
