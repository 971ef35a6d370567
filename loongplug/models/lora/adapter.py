"""Adapters beside the linears of a module, sharded like them, whichever package these are from."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP, apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from loongplug.models.hf_mapping import ADAPTER, Split
from loongplug.models.layers.attention import own_draws
from loongplug.models.layers.inputs import input_for_recompute
from loongplug.models.lora import LoraSettings


def _is_te(linear: nn.Module) -> bool:
    return te.HAVE_TE and isinstance(
        linear,
        (te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELayerNormColumnParallelLinear),
    )


def _split(linear: nn.Module) -> Split | None:
    """How a parallel linear is split, in columns or rows; None for what is none of a known kind."""
    if isinstance(linear, ColumnParallelLinear):
        return Split.COLUMN
    if isinstance(linear, RowParallelLinear):
        return Split.ROW
    if _is_te(linear):
        return Split.ROW if isinstance(linear, te.TERowParallelLinear) else Split.COLUMN
    return None


def _own_input(linear: nn.Module) -> Callable[[Tensor], Tensor]:
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


class Adapter(nn.Module):
    """``alpha / rank * B A dropout(x)``, added to what a parallel linear gives for x.

    ``a`` is [rank, in] and ``b`` [out, rank]. Beside a column-parallel linear, ``b`` is split over
    its outputs and ``a`` is whole on every rank; beside a row-parallel one, ``a`` is split over its
    inputs and ``b`` is whole. What crosses ranks is rank-wide: the linear's own collectives are
    neither repeated nor changed. Both start at zero; who builds a model to train gives ``a``
    values.

    Collective, in forward and backward: the linear's tensor parallel group.
    """

    def __init__(
        self, linear: nn.Module, settings: LoraSettings, *, split: Split, expert: bool, gated: bool
    ) -> None:
        """Beside a ``linear`` of a ``split``; ``gated``: of two halves, each of which is split.

        The linears of experts do not communicate: their dispatcher does.
        """
        super().__init__()
        known: Any = linear
        own_group = hasattr(known, "tp_group") and not _is_te(linear)
        self.group: dist.ProcessGroup = known.tp_group if own_group else known._tp_group
        self.columns, self.expert, self.gated = split is Split.COLUMN, expert, gated
        self.scale, self.dropout = settings.scale, settings.dropout
        # A column's input and a row's output are split over the tokens.
        self.sequence_parallel = (
            bool(known.sequence_parallel) and get_pg_size(self.group) > 1 and not expert
        )
        # Its block's ranks have parts of the sequence, and draw for themselves.
        self.in_parts: bool = known.config.sequence_parallel
        weight = known.weight  # [out / tp, in] or [out, in / tp]
        outputs, inputs = weight.shape
        self.a = _like(weight, settings.rank, inputs)
        self.b = _like(weight, outputs, settings.rank)
        split_one, whole = (self.b, self.a) if self.columns else (self.a, self.b)
        set_tensor_model_parallel_attributes(
            split_one, is_parallel=True, dim=0 if self.columns else 1, stride=1
        )
        # Each rank sees its own tokens there: Megatron sums the gradients of what is so marked.
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The linear's input [..., in / tp or in] to what is added to its output."""
        x = self._dropped(x)
        if self.columns:
            return F.linear(self._inner_of_column(x) * self.scale, self.b)
        return self._from_inner_of_row(F.linear(x, self.a) * self.scale)

    def _inner_of_column(self, x: Tensor) -> Tensor:
        """[..., in] to [..., rank]; each rank's gradient is of its own outputs only."""
        group = self.group
        if self.expert:
            # The dispatcher sums the gradients of x over the ranks: that of a is what is left.
            return F.linear(x, copy_to_tensor_model_parallel_region(self.a, group=group))
        inner = F.linear(x, self.a)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=group)
        return copy_to_tensor_model_parallel_region(inner, group=group)

    def _from_inner_of_row(self, inner: Tensor) -> Tensor:
        """[..., rank], of each rank's own inputs only, to [..., out]."""
        group = self.group
        if self.expert:
            # The dispatcher sums the outputs over the ranks, and with them these.
            return F.linear(inner, copy_to_tensor_model_parallel_region(self.b, group=group))
        if self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=group)
        return F.linear(inner, self.b)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        # All ranks of the group see the same input: the same draw. Experts' ranks may; but ranks of
        # other experts, which draw from one generator, do not.
        if self.columns and not (self.sequence_parallel or self.expert):
            return F.dropout(x, self.dropout)
        with own_draws(sequence_parallel=self.in_parts):
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
        axes = {"b": 0} if self.columns else {"a": 1}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=replicas,
        )
        if self.gated:
            sharded[f"{prefix}b"] = apply_swiglu_sharded_factory(
                sharded[f"{prefix}b"],
                sharded_offsets,
                metadata.get("singleton_local_shards", False),
                tp_group=self.group,
                dp_group=replicas,
            )
        return sharded


def _like(weight: nn.Parameter, *shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
    parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
    return parameter


def add_adapters(module: nn.Module, settings: LoraSettings) -> None:
    """Give the targeted linears of ``module`` adapters, and freeze everything else in it.

    The adapter of ``x.linear_qkv`` is ``x.linear_qkv_lora``: names of other parameters stay. All
    adapters start at zero, which changes nothing in the outputs. No collectives.
    """
    module.requires_grad_(False)
    for path, linear in list(module.named_modules()):
        if settings.targets(path):
            _add_adapter(module, path, linear, settings)
    for block in module.modules():
        if isinstance(block, TransformerBlock):
            block.register_forward_pre_hook(_for_recompute, with_kwargs=True)


def _add_adapter(module: nn.Module, path: str, linear: nn.Module, settings: LoraSettings) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = module.get_submodule(parent_path)
    split = _split(linear)
    if split is None:
        raise ValueError(
            f"lora.target_modules name {path}, a {type(linear).__name__}, beside which no adapter "
            "can stand: leave it out of them, or --moe-grouped-gemm where it is experts'."
        )
    gated = isinstance(parent, MLP) and parent.config.gated_linear_unit and name == "linear_fc1"
    expert = "experts" in path.split(".")
    adapter = Adapter(linear, settings, split=split, expert=expert, gated=gated)
    parent.add_module(f"{name}{ADAPTER}", adapter)
    seen_by = _own_input(linear)

    def beside(_: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        product, bias = output
        return product + adapter(seen_by(inputs[0])), bias

    linear.register_forward_hook(beside)


def _for_recompute(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whatever family the layers are of: what is in front of them is frozen now."""
    states = kwargs.get("hidden_states")
    if isinstance(states, Tensor):
        kwargs["hidden_states"] = input_for_recompute(states, layers=block)
    return args, kwargs


def adapters(model: nn.Module) -> Iterator[tuple[Adapter, nn.Module]]:
    """Every adapter in ``model`` with the linear beside it."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield module, model.get_submodule(name.removesuffix(ADAPTER))
