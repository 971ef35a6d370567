"""Whole tensors under their Hugging Face names, gathered from all ranks one by one."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from loongplug.checkpoint.owned import Group, Owned, innermost, owned_parameters, pg_group
from loongplug.models.hf_mapping import Split, merge_shards
from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.qwen3_vl.hf import hf_mapping

What = Literal["weight", "grad"]


def gather_full_tensors(
    model_chunks: Sequence[nn.Module], *, config: Qwen3VLConfig, what: What = "weight"
) -> dict[str, Tensor] | None:
    """All weights or gradients of the model by Hugging Face name, on the CPU of rank 0.

    A gradient is ``main_grad`` where Megatron keeps one, else ``grad``; parameters without are
    left out. A distributed optimizer leaves each data-parallel rank only its share of
    ``main_grad`` reduced: gather gradients without one, or with a single data-parallel rank.

    Collective: tensor and pipeline parallel groups. Other ranks get None.
    """
    writer = is_writer(model_chunks)
    gathered = {
        name: tensor.to("cpu", copy=True)
        for name, tensor in iterate_full_tensors(model_chunks, config=config, what=what)
    }
    return gathered if writer else None


def is_writer(model_chunks: Sequence[nn.Module]) -> bool:
    """Whether this rank is the one that gets the whole tensors."""
    kinds = ("tp", "pp", "dp_cp")
    return all(get_pg_rank(_group(model_chunks, kind)) == 0 for kind in kinds)


def iterate_full_tensors(
    model_chunks: Sequence[nn.Module], *, config: Qwen3VLConfig, what: What
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) on the writing rank, one parameter at a time.

    Collective: tensor and pipeline parallel groups of data-parallel rank 0; each of their ranks
    must run the iterator to its end, though only the writer gets anything from it. Other
    data-parallel ranks have nothing to do.

    Raises:
        ValueError: a weight that no stage holds, on all ranks alike.
    """
    if get_pg_rank(_group(model_chunks, "dp_cp")) != 0:
        return
    pp_group = _group(model_chunks, "pp")
    pp_rank, tp_rank = get_pg_rank(pp_group), get_pg_rank(_group(model_chunks, "tp"))
    device = next(model_chunks[0].parameters()).device
    mapping = hf_mapping(config)
    tensors: dict[str, tuple[Owned, Tensor]] = {}
    for own in owned_parameters(model_chunks, mapping):
        tensor = _select(own.parameter, what)
        if tensor is not None:
            tensors.setdefault(own.entry.name, (own, tensor))
    holders = _exchange({name: tensor.dtype for name, (_, tensor) in tensors.items()}, pp_group)

    missing = [e.name for e in mapping.entries() if not any(e.name in h for h in holders)]
    if missing and what == "weight":
        raise ValueError(f"No pipeline stage has {', '.join(missing)}.")
    for entry in mapping.entries():
        stage = next((i for i, held in enumerate(holders) if entry.name in held), None)
        if stage is None:
            continue
        whole: list[Tensor] | None = None
        if stage == pp_rank:
            whole = _merge(*tensors[entry.name])
        if tp_rank != 0:
            continue
        if stage == pp_rank != 0:
            assert whole is not None
            for tensor in whole:
                dist.send(tensor.contiguous(), group=pp_group, group_dst=0)
        if pp_rank == 0:
            for index, source in enumerate(entry.sources):
                if stage == 0:
                    assert whole is not None
                    tensor = whole[index]
                else:
                    tensor = torch.empty(
                        source.shape, dtype=holders[stage][entry.name], device=device
                    )
                    dist.recv(tensor, group=pp_group, group_src=stage)
                yield source.name, tensor


def replica_differences(
    model_chunks: Sequence[nn.Module], *, config: Qwen3VLConfig, what: What
) -> dict[str, float]:
    """For every parameter that is not split, how far apart the ranks of its TP group are.

    The largest absolute difference to the group's first rank, by our name. Zero is what a sound
    layout gives: a gradient that lacks a reduction is not seen by gathering, which takes the
    first rank's. Collective: tensor parallel groups.
    """
    differences: dict[str, float] = {}
    for own in owned_parameters(model_chunks, hf_mapping(config)):
        tensor = _select(own.parameter, what)
        if own.entry.row.split is not Split.NONE or tensor is None:
            continue
        difference = torch.zeros((), device=tensor.device)
        if get_pg_size(own.tp_group) > 1:
            first = tensor.clone()
            dist.broadcast(first, group=own.tp_group, group_src=0)
            difference = (tensor - first).abs().max().float()
            dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=own.tp_group)
        differences[own.name] = difference.item()
    return differences


def _group(model_chunks: Sequence[nn.Module], kind: str) -> Group:
    return pg_group(kind, [innermost(model_chunks[0])])


def _select(parameter: nn.Parameter, what: What) -> Tensor | None:
    if what == "weight":
        return parameter.data
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def _exchange(mine: dict[str, torch.dtype], group: Group) -> list[dict[str, torch.dtype]]:
    everyone: list[Any] = [mine] * get_pg_size(group)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _merge(own: Owned, tensor: Tensor) -> list[Tensor] | None:
    """The whole tensors on the first rank of the parameter's TP group; the others only send."""
    size = get_pg_size(own.tp_group)
    if own.entry.row.split is Split.NONE or size == 1:
        return merge_shards(own.entry.row, [tensor])
    first = get_pg_rank(own.tp_group) == 0
    shards = [torch.empty_like(tensor) for _ in range(size)] if first else None
    dist.gather(tensor.contiguous(), shards, group=own.tp_group, group_dst=0)
    return merge_shards(own.entry.row, shards) if shards is not None else None
