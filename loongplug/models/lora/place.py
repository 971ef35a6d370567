"""What an adapter has to know of the linear beside it, whichever package the linear is from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from loongplug.models.hf_mapping import Split


@dataclass(frozen=True, kw_only=True)
class LinearPlace:
    """Where a parallel linear stands.

    ``split`` is COLUMN or ROW. With ``sequence_parallel``, a column's input and a row's output are
    split over the tokens. The linears of experts talk to nobody: their dispatcher does.
    """

    weight: nn.Parameter  # [out / tp, in] or [out, in / tp]
    split: Split
    group: dist.ProcessGroup
    sequence_parallel: bool
    in_parts: bool  # its block's ranks have parts of the sequence, and draw for themselves
    expert: bool

    @property
    def same_input(self) -> bool:
        """Whether all ranks of the group see the same input, as many values at a time.

        Experts' ranks may; but ranks of other experts, which draw from one generator, do not.
        """
        return self.split is Split.COLUMN and not (self.sequence_parallel or self.expert)


def linear_place(linear: nn.Module, *, expert: bool) -> LinearPlace | None:
    """The place of a linear; None for what is no parallel linear of a known kind."""
    split = _split(linear)
    if split is None:
        return None
    known: Any = linear
    group = known.tp_group if hasattr(known, "tp_group") and not _is_te(linear) else known._tp_group
    return LinearPlace(
        weight=known.weight,
        split=split,
        group=group,
        sequence_parallel=bool(known.sequence_parallel) and get_pg_size(group) > 1 and not expert,
        in_parts=known.config.sequence_parallel,
        expert=expert,
    )


def _split(linear: nn.Module) -> Split | None:
    if isinstance(linear, ColumnParallelLinear):
        return Split.COLUMN
    if isinstance(linear, RowParallelLinear):
        return Split.ROW
    if _is_te(linear):
        return Split.ROW if isinstance(linear, te.TERowParallelLinear) else Split.COLUMN
    return None


def _is_te(linear: nn.Module) -> bool:
    return te.HAVE_TE and isinstance(
        linear,
        (te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELayerNormColumnParallelLinear),
    )


def own_input(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """From a module's input to what its linear sees: TransformerEngine's may norm first."""
    if not (te.HAVE_TE and isinstance(linear, te.TELayerNormColumnParallelLinear)):
        return lambda x: x
    known: Any = linear

    def normed(x: Tensor) -> Tensor:
        weight = known.layer_norm_weight
        if known.zero_centered_gamma:
            weight = weight + 1
        if known.normalization == "RMSNorm":
            return F.rms_norm(x, (x.shape[-1],), weight, known.eps)
        return torch.layer_norm(x, (x.shape[-1],), weight, known.layer_norm_bias, known.eps)

    return normed
