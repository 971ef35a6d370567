"""The dtypes that weights are stored in, so that a conversion can keep every one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from loongplug.checkpoint.parameter_holders import held_parameters
from loongplug.checkpoint.resume_checks import saved_tensors
from loongplug.checkpoint.safetensors_folder import FLOATS, open_tensors, present_name
from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.lora.peft_config import ADAPTER_WEIGHTS_FILE


def folder_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a Hugging Face folder; reads headers only."""
    with open_tensors(folder) as tensors:
        return {name: FLOATS[kind] for name, kind in tensors.types().items() if kind in FLOATS}


def checkpoint_dtypes(iteration_folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor of one of our ``torch_dist`` checkpoints, by Megatron's key."""
    return {
        key: described.properties.dtype
        for key, described in saved_tensors(iteration_folder).items()
    }


def give_folder_dtypes(
    model_chunks: Sequence[nn.Module], model: HuggingFaceModel, dtypes: dict[str, torch.dtype]
) -> None:
    """Empty parameters of the dtypes in a folder in the place of the chunks' own.

    ``dtypes`` are by the names that the folder's files have.

    Raises:
        ValueError: tensors that share a parameter, or a kind of parameter in different layers,
            differ in dtype, which no checkpoint can hold.
    """
    wanted: dict[int, torch.dtype] = {}
    problems: list[str] = []
    mapping, formerly = model.mapping, model.in_transformers.formerly
    dtypes = {present_name(name, formerly): dtype for name, dtype in dtypes.items()}
    for bundle in mapping.bundles():
        for source in bundle.sources:
            dtype = dtypes.get(source.name)
            if dtype is not None and wanted.setdefault(bundle.number, dtype) != dtype:
                problems.append(f"{source.name} is {dtype}, others {wanted[bundle.number]}")
    if problems:
        raise ValueError(
            "Tensors that belong together have different dtypes: "
            + "; ".join(problems[:5])
            + ". Save the model again in one dtype."
        )
    for own in held_parameters(model_chunks, mapping):
        _retype(own.parameter, wanted.get(own.entry.number))


def give_adapter_dtype(
    model_chunks: Sequence[nn.Module], table: AdapterTable, folder: Path
) -> None:
    """Empty adapters of a folder's dtype in the place of the chunks' own. No collectives.

    A folder that cannot be read, or that mixes dtypes, is left to :func:`load_adapters`, which
    says so or rounds.
    """
    try:
        with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
            found = {FLOATS.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return
    for own in held_parameters(model_chunks, table.mapping):
        if len(found) == 1 and None not in found:
            own.parameter.data = own.parameter.data.to(next(iter(found)))


def give_checkpoint_dtypes(
    model_chunks: Sequence[nn.Module], dtypes: dict[str, torch.dtype], *, folder: Path
) -> None:
    """Empty parameters of the dtypes in a checkpoint's folder in the place of the chunks' own."""
    from megatron.core.dist_checkpointing import load_content_metadata

    metadata = load_content_metadata(str(folder))  # says how tensors are named in it
    for chunk in model_chunks:
        parameters = dict(chunk.named_parameters())
        shards: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for name, sharded in shards.items():
            if name in parameters:
                _retype(parameters[name], dtypes.get(sharded.key))


def _retype(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    if dtype is not None and parameter.dtype != dtype:
        parameter.data = torch.empty_like(parameter.data, dtype=dtype)
