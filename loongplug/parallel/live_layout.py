"""The layout that Megatron was initialized with, read from its groups."""

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.parallel.layout import Layout


def live_layout() -> Layout:
    """The layout of Megatron's parallel state as it is now; ranks do not talk.

    Raises:
        RuntimeError: the parallel state is not initialized.
        ValueError: its groups are not those of a layout over all ranks in Megatron's default
            order.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "Megatron's parallel state is not initialized: call initialize_model_parallel() first."
        )
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }
    layout = Layout(**{kind: group.size() for kind, group in groups.items()})
    rank = dist.get_rank()
    if layout.world_size != dist.get_world_size():
        raise ValueError(
            f"the parallel state spans {layout.world_size} ranks and there are "
            f"{dist.get_world_size()}: it has to span all of them."
        )
    for kind, group in groups.items():
        found, expected = dist.get_process_group_ranks(group), layout.group(kind, rank)
        if found != expected:
            raise ValueError(
                f"the {kind} group of rank {rank} has ranks {found}, in Megatron's default order "
                f"it has {expected}: parallel states know the order tp-cp-ep-dp-pp only, which "
                "is Megatron's without --use-tp-pp-dp-mapping."
            )
    return layout
