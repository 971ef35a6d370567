"""A model's weights or gradients on one rank, and how far replicas of them are apart."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from loongplug.checkpoint.hf_gather import What, WholeTensors, gradient, loaded_weight
from loongplug.checkpoint.parameter_holders import held_parameters, own_rank
from loongplug.models.hf_mapping import Mapping, Split


def gather_full_tensors(
    model_chunks: Sequence[nn.Module], mapping: Mapping, *, what: What = "weight"
) -> dict[str, Tensor] | None:
    """All weights or gradients of the model by Hugging Face name, on the CPU of rank 0.

    Collective: the default group. Other ranks get None.
    """
    gathered = {
        source.name: tensor.to("cpu", copy=True)
        for _, source, tensor in WholeTensors(model_chunks, mapping, what=what).collect(lambda _: 0)
    }
    return gathered if own_rank() == 0 else None


def replica_differences(
    model_chunks: Sequence[nn.Module], mapping: Mapping, *, what: What
) -> dict[str, float]:
    """For every parameter that is not split, how far apart the ranks of its TP group are.

    The largest absolute difference to the group's first rank, by our name. Zero is what a sound
    layout gives: a gradient that lacks a reduction is not seen by gathering, which takes the
    first rank's. Collective: tensor parallel groups.
    """
    named: dict[What, What] = {"weight": loaded_weight, "grad": gradient}
    value_of: Any = named.get(what, what)
    differences: dict[str, float] = {}
    for own in held_parameters(model_chunks, mapping):
        tensor = value_of(own.parameter)
        if own.entry.row.split is not Split.NONE or tensor is None:
            continue
        difference = torch.zeros((), device=tensor.device)
        if get_pg_size(own.group) > 1:
            first = tensor.clone()
            dist.broadcast(first, group=own.group, group_src=0)
            difference = (tensor - first).abs().max().float()
            dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=own.group)
        differences[own.name] = difference.item()
    return differences
