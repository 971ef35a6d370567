"""Data parallelism per module: one chunk whose modules have buffers and groups of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from loongplug.parallel.module_parts import ModulePart, ModuleState


class ModuleDataParallel(DistributedDataParallel):
    """Megatron's data parallel wrapper of a chunk, made of one wrapper per :class:`ModulePart`.

    The chunk tells its parts (``parallel_parts()``). Each part's wrapper is built in its parallel
    state and so reduces over its groups; a rank that has no part in one has no wrapper of it. This
    one holds all their buffers and bucket groups in one list each, so that whatever Megatron does
    to a chunk is done to all of them in one order.
    Unlike ``megatron.core.models.mimo``, there may be several chunks (virtual stages).

    Collective, in what Megatron makes collective, over each part's groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: FullParamLayout | None = None,
    ) -> None:
        """As Megatron's; the last two, meant for the whole chunk, are each part's own instead."""
        # Gradient factors are what is left to do where nothing is divided by replicas.
        assert config.calculate_per_token_loss
        # Not DistributedDataParallel's own: it would make buffers for the chunk as a whole.
        super(DistributedDataParallel, self).__init__(config=config, module=module)
        self.ddp_config = ddp_config
        parts: tuple[ModulePart, ...] = get_attr_wrapped_model(module, "parallel_parts")()
        self.states = {part.name: part.state for part in parts}
        self.lr_mults = {
            part.name: {**dict.fromkeys(part.modules, 1.0), **part.lr_mults} for part in parts
        }
        self.parts = {
            part.name: _wrapped(
                part, part.state, config, ddp_config=ddp_config, single=disable_bucketing
            )
            for part in parts
            if part.state is not None
        }
        assert len(self.states) == len(parts), "two parts of one name"
        self.buffers: Any = self._all("buffers")  # Megatron's name for them; torch's is a method
        self.expert_parallel_buffers = self._all("expert_parallel_buffers")
        self.bucket_groups = self._all("bucket_groups")
        self.expert_parallel_bucket_groups = self._all("expert_parallel_bucket_groups")
        self.params_with_grad = self._all("params_with_grad")
        self.param_to_bucket_group = {
            parameter: group
            for part in self.parts.values()
            for parameter, group in part.param_to_bucket_group.items()
        }
        # Parts that run outside of the schedule, which so cannot tell when their parameters are
        # needed and their gradients made: each module waits for the ones, the last of the
        # others starts the reduction. Who runs them may do both for all modules.
        self.outside_schedule: set[str] = set()

    def _all(self, name: str) -> list[Any]:
        return [each for part in self.parts.values() for each in getattr(part, name)]

    @property
    def force_all_reduce(self) -> bool:
        """Whether gradients are all-reduced where they would be reduce-scattered."""
        return any(part.force_all_reduce for part in self.parts.values())

    @force_all_reduce.setter
    def force_all_reduce(self, force: bool) -> None:
        for part in self.parts.values():
            part.force_all_reduce = force

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reduction of the gradients that the schedule has made."""
        for name, part in self.parts.items():
            if name not in self.outside_schedule:
                part.start_grad_sync()

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Start gathering what the schedule needs; with ``force_sync`` gather all, now."""
        for name, part in self.parts.items():
            if force_sync or name not in self.outside_schedule:
                part.start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)

    def enable_forward_pre_hook(self) -> None:
        """Wait for each module's parameters before its forward, for all parts."""
        for part in self.parts.values():
            part.enable_forward_pre_hook()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """End that; with ``param_sync``, gather all parameters now."""
        for part in self.parts.values():
            part.disable_forward_pre_hook(param_sync=param_sync)

    def broadcast_params(self) -> None:
        """Each part's parameters from the first of its data parallel ranks to the others."""
        for part in self.parts.values():
            part.broadcast_params()


class _PartDataParallel(DistributedDataParallel):
    """Megatron's wrapper of one part."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As Megatron's, which would also end one that it is within."""
        groups = bucket_groups_of(self)
        before = [each.is_last_microbatch for each in groups]
        try:
            with super().no_sync():
                yield
        finally:
            for each, last in zip(groups, before, strict=True):
                each.is_last_microbatch = last


def wrapper_of_nothing(chunk: ModuleDataParallel) -> DistributedDataParallel:
    """The wrapper of a part without modules, in Megatron's state as it is now."""
    state = ModuleState(groups=ProcessGroupCollection.use_mpu_process_groups())
    nothing = ModulePart(name="nothing", state=state, modules={})
    return _wrapped(nothing, state, chunk.config, ddp_config=chunk.ddp_config, single=True)


def bucket_groups_of(wrapped: DistributedDataParallel) -> list[Any]:
    """All groups of gradient buckets of a chunk or a part, those of experts last."""
    return [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]


def _wrapped(
    part: ModulePart,
    state: ModuleState,
    config: TransformerConfig,
    *,
    ddp_config: DistributedDataParallelConfig,
    single: bool,
) -> DistributedDataParallel:
    """Megatron's wrapper around a part; the modules are called by the chunk, not through it."""
    holder = nn.Module()
    for name, module in part.modules.items():
        holder.add_module(name, module)
    with state.entered():
        wrapped = _PartDataParallel(
            config,
            ddp_config,
            holder,
            disable_bucketing=single,
            full_param_layout=part_layout(
                holder, ddp_config=ddp_config, groups=state.groups, single=single
            ),
        )
    for group in bucket_groups_of(wrapped):
        for bucket in group.buckets:
            bucket.gradient_scaling_factor *= state.gradient_factor
    return wrapped


def part_layout(
    holder: nn.Module,
    *,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroupCollection,
    single: bool,
) -> FullParamLayout | None:
    """Where the distributed optimizer wants each parameter of a part, sized by its own groups.

    None without that optimizer. ``single``: in one bucket for each kind of parameter.
    """
    if not ddp_config.use_distributed_optimizer:
        return None
    return DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in holder.parameters() if parameter.requires_grad],
        None if single or groups.pp.rank() > 0 else ddp_config.bucket_size,
        groups.intra_dp_cp.size(),
        ddp_config,
        expert_data_parallel_world_size=groups.intra_expt_dp.size(),
    )
