"""Attention of one tile with its logsumexp, by torch's own kernels.

A query's keys may be spread over several tiles. The logsumexp of its scores in each is what
their results are merged by. Given the logsumexp and the output over *all* of a query's keys, a
tile's backward gives exactly the tile's part of the gradients.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from loongplug.platform.active import is_host

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
    elif q.dtype == torch.float64:
        out, lse = _written_out(q, k, v, causal, scale)
    else:
        scale, channels = _scale_if_padded(q, scale), q.size(-1)
        q, k, v = map(_aligned, (q, k, v))
        if q.dtype == torch.float32:
            out, lse = _efficient(q, _for_each_head(k, q), _for_each_head(v, q), causal, scale)
        else:
            out, lse = _flash(q, k, v, causal, scale)
        out = out[..., :channels]
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
    elif q.dtype == torch.float64:
        dq, dk, dv = _written_out_backward(grad, q, k, v, out, lse, causal, scale)
    else:
        scale, channels = _scale_if_padded(q, scale), q.size(-1)
        grad, q, k, v, out = map(_aligned, (grad, q, k, v, out))
        if q.dtype == torch.float32:
            keys, values = _for_each_head(k, q), _for_each_head(v, q)
            dq, dk, dv = _efficient_backward(grad, q, keys, values, out, lse, causal, scale)
            dk, dv = (_of_groups(each, k) for each in (dk, dv))
        else:
            dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, causal, scale)
        dq, dk, dv = (each[..., :channels] for each in (dq, dk, dv))
    return dq, dk, dv


def _by_cpu(q: Tensor) -> bool:
    """Whether the CPU's kernel serves ``q``; one without values goes where the run's would."""
    return is_host() if q.is_meta else q.device.type != "cuda"


def _scale_of(q: Tensor, scale: float | None) -> float:
    """What scores are multiplied by."""
    return float(q.size(-1) ** -0.5) if scale is None else scale


def _scale_if_padded(q: Tensor, scale: float | None) -> float | None:
    """As a kernel is to be told once ``q`` has been padded, by whose channels None would go.

    None where nothing is padded: torch's shapes of the memory-efficient backward take no other.
    """
    return _scale_of(q, scale) if q.size(-1) % _CHANNELS_ALIGNED_TO else scale


def _aligned(x: Tensor) -> Tensor:
    """With channels of zeros behind its own, as many as kernels want; ``x`` where it has them.

    They add nothing to a score, and the output and the gradients have zeros there.
    """
    missing = -x.size(-1) % _CHANNELS_ALIGNED_TO
    return pad(x, (0, missing)) if missing else x


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each head of ``q``, which that kernel wants."""
    return x.repeat_interleave(q.size(1) // x.size(1), dim=1)


def _of_groups(grad: Tensor, k: Tensor) -> Tensor:
    """The gradient of what :func:`_for_each_head` gave, as that of ``k``."""
    return grad.unflatten(1, (k.size(1), -1)).sum(2)


def _scores(q: Tensor, keys: Tensor, causal: bool, scale: float | None) -> Tensor:
    """All scores [b, heads, s_q, s_k], -inf for keys that a query does not see."""
    scores = q @ keys.transpose(2, 3) * _scale_of(q, scale)
    if causal:
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Without a kernel: CUDA has none for float64, in which nobody trains."""
    scores = _scores(q, _for_each_head(k, q), causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ _for_each_head(v, q), lse


def _written_out_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _for_each_head(k, q), _for_each_head(v, q)
    weights = (_scores(q, keys, causal, scale) - lse.unsqueeze(-1)).exp()
    of_weights = grad @ values.transpose(2, 3)
    # A weight's gradient less the mean over all of the query's keys, in this tile or elsewhere.
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * _scale_of(q, scale)
    dk, dv = of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad
    return of_scores @ keys, _of_groups(dk, k), _of_groups(dv, v)


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
    lse = pad(lse, (0, -lse.size(-1) % _LSE_ALIGNED_TO), value=float("inf"))
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
