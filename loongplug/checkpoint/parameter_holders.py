"""Which parameters of the whole model this rank holds, and which ranks hold which."""

import re
from collections import abc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import nn

from loongplug.checkpoint.common_errors import of_all_ranks
from loongplug.models.hf_mapping import MappedParameter, Mapping, Split, shift_layers
from loongplug.platform import current_platform

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class ParameterPiece:
    """A tensor parallel slice of one parameter of the whole model.

    ``row``, ``layer`` and ``expert`` say which parameter of the mapping it is, ``part`` and
    ``parts`` which slice; a parameter that is not split has the one part 0.
    """

    row: int
    layer: int | None
    expert: int | None
    part: int
    parts: int


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank, and what it is in the whole model.

    ``group`` is the tensor parallel group that the parameter lives in, also where every rank of
    it has the whole of it.
    """

    name: str
    entry: MappedParameter
    piece: ParameterPiece
    parameter: nn.Parameter
    group: Group


Holders = dict[ParameterPiece, tuple[int, ...]]


def held_parameters(model_chunks: Sequence[nn.Module], mapping: Mapping) -> list[HeldParameter]:
    """This rank's parameters, wrappers (DDP, Float16Module) looked through, in mapping order."""
    held: list[HeldParameter] = []
    unknown: list[str] = []
    for chunk in model_chunks:
        modules = _modules(chunk)
        for local_name, name, entry, parameter in _entries(chunk, modules, mapping):
            if not mapping.covers(local_name):
                continue
            if entry is None:
                unknown.append(f"{name} {tuple(parameter.shape)}")
                continue
            kind = "tp" if entry.expert is None else "expt_tp"
            group = _pg_group(kind, [modules.get(local_name.partition(".")[0]), modules[""]])
            held.append(HeldParameter(entry.name, entry, _piece(entry, group), parameter, group))
    if unknown:
        raise ValueError(
            "The mapping to Hugging Face names has no row for " + ", ".join(unknown) + "; only "
            "models built from the same config can be imported or exported."
        )
    return sorted(held, key=lambda own: sort_key(own.piece))


def parameter_names(
    model_chunks: Sequence[nn.Module], mapping: Mapping
) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters with the names by which a user knows them; no collectives.

    They are the same in every layout: layers and experts are counted over the whole model. Where
    backends keep a parameter in different modules, and where stages keep copies of it (tied
    embeddings), it has the mapping's first name for it; what the mapping does not know (an
    adapter) has its own.
    """
    for chunk in model_chunks:
        for _, name, entry, parameter in _entries(chunk, _modules(chunk), mapping):
            yield name if entry is None else entry.name, parameter


def _modules(chunk: nn.Module) -> dict[str, nn.Module]:
    return {_without_wrappers(name): module for name, module in chunk.named_modules()}


def _entries(
    chunk: nn.Module, modules: dict[str, nn.Module], mapping: Mapping
) -> Iterator[tuple[str, str, MappedParameter | None, nn.Parameter]]:
    """Each parameter's name in the chunk, that with the model's layers, its entry, and itself."""
    offsets = _layer_offsets(modules)
    for wrapped_name, parameter in chunk.named_parameters():
        local_name = _without_wrappers(wrapped_name)
        name = shift_layers(local_name, offsets)
        entry = mapping.find(name)
        if entry is not None and entry.expert is not None:
            # The name counts this rank's experts only.
            layer: Any = modules[local_name.partition(".experts.")[0]]  # Megatron's MoELayer
            expert = layer.local_expert_indices[entry.expert]
            entry = MappedParameter(entry.row, entry.number, entry.layer, expert)
        yield local_name, name, entry, parameter


def sort_key(piece: ParameterPiece) -> tuple[int, int, int, int]:
    """The key of the one order that pieces have on all ranks."""
    layer, expert = (-1 if index is None else index for index in (piece.layer, piece.expert))
    return piece.row, layer, expert, piece.part


def _pg_group(kind: str, modules: Sequence[nn.Module | None]) -> Group:
    """The ``kind`` group of the first module with a collection."""
    for module in modules:
        if (collection := getattr(module, "pg_collection", None)) is not None:
            return getattr(collection, kind)
    return None


def _piece(entry: MappedParameter, group: Group) -> ParameterPiece:
    split = entry.row.split is not Split.NONE
    part, parts = (get_pg_rank(group), get_pg_size(group)) if split else (0, 1)
    return ParameterPiece(entry.number, entry.layer, entry.expert, part, parts)


def _without_wrappers(name: str) -> str:
    """A parameter's or module's name as if neither DDP nor Float16Module were around it."""
    return ".".join(piece for piece in name.split(".") if piece != "module")


def _layer_offsets(modules: dict[str, nn.Module]) -> dict[str, int]:
    """For each list of transformer layers, how far its indices are from the global ones."""
    offsets: dict[str, int] = {}
    for name, module in modules.items():
        match = re.fullmatch(r"(.+\.layers)\.0", name)
        number: Any = getattr(module, "layer_number", None)
        if match and number is not None:
            offsets[match.group(1)] = number - 1
    return offsets


def all_holders(held: Sequence[HeldParameter]) -> tuple[Holders, dict[ParameterPiece, torch.dtype]]:
    """The ranks that hold each piece, ascending, and the first of them's dtype of it.

    Pieces come in one order on every rank. Collective: the default group, when there is one.
    """
    ranks: dict[ParameterPiece, list[int]] = {}
    dtypes: dict[ParameterPiece, torch.dtype] = {}
    mine = [(own.piece, own.parameter.dtype) for own in held]
    for rank, pieces in enumerate(of_all_ranks(mine)):
        for piece, dtype in pieces:
            ranks.setdefault(piece, []).append(rank)
            dtypes.setdefault(piece, dtype)
    ordered = sorted(ranks, key=sort_key)
    return {piece: tuple(dict.fromkeys(ranks[piece])) for piece in ordered}, dtypes


@contextmanager
def replica_groups(holders: Holders) -> Iterator[abc.Mapping[tuple[int, ...], Any]]:
    """A process group for every set of several ranks that hold the same piece.

    The groups last as long as the context and have the default group's time limit. Collective:
    the default group.
    """
    sets = [ranks for ranks in dict.fromkeys(holders.values()) if len(ranks) > 1]
    groups = {ranks: dist.new_group(list(ranks), timeout=_time_limit()) for ranks in sets}
    try:
        yield groups
    finally:
        for ranks, group in groups.items():
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)


def _time_limit() -> timedelta | None:
    """``--distributed-timeout-minutes``, which torch does not hand on to new groups."""
    world = dist.group.WORLD
    assert world is not None
    options = getattr(world._get_backend(current_platform().device), "options", None)
    return getattr(options, "_timeout", None)


def own_rank() -> int:
    """This process's global rank; 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0
