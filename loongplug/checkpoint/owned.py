"""Which parameters of the whole model this rank holds, found in its model chunks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from loongplug.models.hf_mapping import Entry, Mapping, shift_layers

Group = torch.distributed.ProcessGroup | None


@dataclass(frozen=True)
class Owned:
    """A parameter of this rank, what it is in the whole model, and who has its other slices."""

    name: str
    entry: Entry
    parameter: nn.Parameter
    tp_group: Group


def owned_parameters(model_chunks: Sequence[nn.Module], mapping: Mapping) -> list[Owned]:
    """This rank's parameters, wrappers (DDP, Float16Module) looked through.

    Raises:
        ValueError: naming parameters that the mapping does not know.
    """
    owned: list[Owned] = []
    unknown: list[str] = []
    for chunk in model_chunks:
        modules = {_without_wrappers(name): module for name, module in chunk.named_modules()}
        offsets = _layer_offsets(modules)
        for wrapped_name, parameter in chunk.named_parameters():
            name = shift_layers(_without_wrappers(wrapped_name), offsets)
            entry = mapping.find(name)
            if entry is None:
                unknown.append(f"{name} {tuple(parameter.shape)}")
            else:
                group = pg_group("tp", [modules.get(name.partition(".")[0]), modules[""]])
                owned.append(Owned(name, entry, parameter, group))
    if unknown:
        raise ValueError(
            "The mapping to Hugging Face names has no row for " + ", ".join(unknown) + "; only "
            "models built from the same config can be imported or exported."
        )
    return owned


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
        "pp": parallel_state.get_pipeline_model_parallel_group,
        "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    return current[kind]()


def innermost(chunk: nn.Module) -> nn.Module:
    """The model inside its wrappers."""
    return [module for name, module in chunk.named_modules() if not _without_wrappers(name)][-1]


def _without_wrappers(name: str) -> str:
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
