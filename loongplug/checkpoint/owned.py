"""Which parameters of the whole model this rank holds, found in its model chunks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import nn

from loongplug.models.hf_mapping import MappedParameter, Mapping, Split, shift_layers

Group = torch.distributed.ProcessGroup | None


@dataclass(frozen=True)
class Piece:
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
class Owned:
    """A parameter of this rank, and what it is in the whole model.

    ``group`` is the tensor parallel group that the parameter lives in, also where every rank of
    it has the whole of it.
    """

    name: str
    entry: MappedParameter
    piece: Piece
    parameter: nn.Parameter
    group: Group


def owned_parameters(model_chunks: Sequence[nn.Module], mapping: Mapping) -> list[Owned]:
    """This rank's parameters, wrappers (DDP, Float16Module) looked through, in mapping order.

    Raises:
        ValueError: naming parameters that the mapping does not know.
    """
    owned: list[Owned] = []
    unknown: list[str] = []
    for chunk in model_chunks:
        modules = {without_wrappers(name): module for name, module in chunk.named_modules()}
        offsets = layer_offsets(modules)
        for wrapped_name, parameter in chunk.named_parameters():
            local_name = without_wrappers(wrapped_name)
            if not mapping.covers(local_name):
                continue
            shifted = shift_layers(local_name, offsets)
            found = mapping.find(shifted)
            if found is None:
                unknown.append(f"{shifted} {tuple(parameter.shape)}")
                continue
            entry = global_entry(found, local_name, modules)
            kind = "tp" if entry.expert is None else "expt_tp"
            group = pg_group(kind, [modules.get(local_name.partition(".")[0]), modules[""]])
            owned.append(Owned(entry.name, entry, _piece(entry, group), parameter, group))
    if unknown:
        raise ValueError(
            "The mapping to Hugging Face names has no row for " + ", ".join(unknown) + "; only "
            "models built from the same config can be imported or exported."
        )
    return sorted(owned, key=lambda own: sort_key(own.piece))


def sort_key(piece: Piece) -> tuple[int, int, int, int]:
    """One order of pieces for all ranks."""
    layer, expert = (-1 if index is None else index for index in (piece.layer, piece.expert))
    return piece.row, layer, expert, piece.part


def pg_group(kind: str, modules: Sequence[nn.Module | None]) -> Group:
    """The ``kind`` group of the first module with a collection, else Megatron's global one."""
    for module in modules:
        collection = getattr(module, "pg_collection", None)
        if collection is not None:
            return getattr(collection, kind)
    if not parallel_state.model_parallel_is_initialized():
        return None
    current: dict[str, Any] = {
        "tp": parallel_state.get_tensor_model_parallel_group,
        "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    }
    return current[kind]()


def _piece(entry: MappedParameter, group: Group) -> Piece:
    split = entry.row.split is not Split.NONE
    part, parts = (get_pg_rank(group), get_pg_size(group)) if split else (0, 1)
    return Piece(entry.number, entry.layer, entry.expert, part, parts)


def global_entry(
    entry: MappedParameter, name: str, modules: dict[str, nn.Module]
) -> MappedParameter:
    """``entry``, found by a name that counts this rank's experts only, for the global expert."""
    if entry.expert is None:
        return entry
    layer: Any = modules[name.partition(".experts.")[0]]  # Megatron's MoELayer
    return MappedParameter(
        entry.row, entry.number, entry.layer, layer.local_expert_indices[entry.expert]
    )


def without_wrappers(name: str) -> str:
    """A parameter's or module's name as if neither DDP nor Float16Module were around it."""
    return ".".join(piece for piece in name.split(".") if piece != "module")


def layer_offsets(modules: dict[str, nn.Module]) -> dict[str, int]:
    """For each list of transformer layers, how far its indices are from the global ones."""
    offsets: dict[str, int] = {}
    for name, module in modules.items():
        match = re.fullmatch(r"(.+\.layers)\.0", name)
        number: Any = getattr(module, "layer_number", None)
        if match and number is not None:
            offsets[match.group(1)] = number - 1
    return offsets
