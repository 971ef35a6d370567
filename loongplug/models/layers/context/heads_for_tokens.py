"""``--cp-comm-type a2a``: each rank gives tokens away for heads, and attends over whole rows."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from loongplug.models.layers.context.row import ContextRow


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    row: ContextRow,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention in which each rank computes its share of the heads for all tokens of the row.

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
