"""One adapter, sharded like the linear beside which it runs."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from loongplug.models.hf_mapping import Split
from loongplug.models.layers.recompute import own_draws
from loongplug.models.lora.place import LinearPlace
from loongplug.models.lora.settings import LoraSettings


class Adapter(nn.Module):
    """``alpha / rank * B A dropout(x)``, added to what a parallel linear gives for x.

    ``a`` is [rank, in] and ``b`` [out, rank]. Beside a column-parallel linear, ``b`` is split over
    its outputs and ``a`` is whole on every rank; beside a row-parallel one, ``a`` is split over its
    inputs and ``b`` is whole. What crosses ranks is rank-wide: the linear's own collectives are
    neither repeated nor changed. Both start at zero; who builds a model to train gives ``a``
    values.

    Collective, in forward and backward: the linear's tensor parallel group.
    """

    def __init__(self, place: LinearPlace, settings: LoraSettings, *, gated: bool) -> None:
        super().__init__()
        self.place = place
        self.scale = settings.scale
        self.dropout = settings.dropout
        self.gated = gated  # two halves, each of which tensor parallelism splits
        outputs, inputs = place.weight.shape
        self.a = self._parameter(settings.rank, inputs)
        self.b = self._parameter(outputs, settings.rank)
        split, whole = (self.b, self.a) if place.split is Split.COLUMN else (self.a, self.b)
        set_tensor_model_parallel_attributes(
            split, is_parallel=True, dim=0 if place.split is Split.COLUMN else 1, stride=1
        )
        # Each rank sees its own tokens there: Megatron sums the gradients of what is so marked.
        whole.sequence_parallel = place.sequence_parallel  # type: ignore[attr-defined]

    def _parameter(self, *shape: int) -> nn.Parameter:
        weight = self.place.weight
        parameter = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """The linear's input [..., in / tp or in] to what is added to its output."""
        x = self._dropped(x)
        if self.place.split is Split.COLUMN:
            return F.linear(self._inner_of_column(x) * self.scale, self.b)
        return self._from_inner_of_row(F.linear(x, self.a) * self.scale)

    def _inner_of_column(self, x: Tensor) -> Tensor:
        """[..., in] to [..., rank]; each rank's gradient is of its own outputs only."""
        group = self.place.group
        if self.place.expert:
            # The dispatcher sums the gradients of x over the ranks: that of a is what is left.
            return F.linear(x, copy_to_tensor_model_parallel_region(self.a, group=group))
        inner = F.linear(x, self.a)
        if self.place.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=group)
        return copy_to_tensor_model_parallel_region(inner, group=group)

    def _from_inner_of_row(self, inner: Tensor) -> Tensor:
        """[..., rank], of each rank's own inputs only, to [..., out]."""
        group = self.place.group
        if self.place.expert:
            # The dispatcher sums the outputs over the ranks, and with them these.
            return F.linear(inner, copy_to_tensor_model_parallel_region(self.b, group=group))
        if self.place.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=group)
        return F.linear(inner, self.b)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        if self.place.same_input:
            return F.dropout(x, self.dropout)  # the same draw on all ranks of the group
        with own_draws(sequence_parallel=self.place.in_parts):
            return F.dropout(x, self.dropout)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """What merging adds to this rank's slice of the linear's weight, [out, in] float32."""
        return b.float() @ a.float() * self.scale

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As Megatron's linears: where this rank's slices lie. No collectives."""
        assert metadata is not None
        replicas = metadata["dp_cp_group"]
        axes = {"b": 0} if self.place.split is Split.COLUMN else {"a": 1}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.place.group,
            dp_cp_group=replicas,
        )
        if self.gated:
            sharded[f"{prefix}b"] = apply_swiglu_sharded_factory(
                sharded[f"{prefix}b"],
                sharded_offsets,
                metadata.get("singleton_local_shards", False),
                tp_group=self.place.group,
                dp_group=replicas,
            )
        return sharded
