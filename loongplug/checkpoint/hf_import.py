"""Fill a model's parameters from a Hugging Face folder, each rank with what it owns."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.owned import Owned, owned_parameters
from loongplug.checkpoint.tensor_folder import TensorFolder, open_tensors
from loongplug.models.hf_mapping import Mapping, local_shape, read_local
from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.qwen3_vl.hf import hf_config_differences, hf_mapping


def load_hf_weights(
    model_chunks: Sequence[nn.Module], folder: Path, *, config: Qwen3VLConfig
) -> None:
    """Copy the weights in ``folder`` into the parameters of ``model_chunks``, in place.

    Every rank reads only its own layers and slices, converted to its parameters' dtype. Call it
    before an optimizer copies the parameters. Collective: the default group.

    Raises:
        ValueError: on all ranks alike; names every missing, extra and misshapen tensor, and
            every difference between the folder's config.json and ``config``. No parameter was
            changed unless a file broke while it was read.
    """
    error: Exception | None = None
    try:
        _load(model_chunks, folder, config=config)
    except Exception as caught:  # whatever it is, the other ranks are waiting
        error = caught
    raise_together(error)


def _load(model_chunks: Sequence[nn.Module], folder: Path, *, config: Qwen3VLConfig) -> None:
    mapping = hf_mapping(config)
    with open_tensors(folder) as tensors:
        problems = [
            *hf_config_differences(folder, config),
            *_file_problems(tensors, mapping),
        ]
        if problems:
            raise ValueError(
                f"The model in {folder} is not the one in the config:\n  " + "\n  ".join(problems)
            )
        owned = owned_parameters(model_chunks, mapping)
        problems = [problem for own in owned if (problem := _shape_problem(own))]
        if problems:
            raise ValueError(
                "The model was not built from the config it is loaded with:\n  "
                + "\n  ".join(problems)
            )
        for own in owned:
            _fill(own, tensors, mapping=mapping)


def _file_problems(tensors: TensorFolder, mapping: Mapping) -> list[str]:
    expected, found = mapping.sources(), tensors.shapes()
    allowed = expected | {
        twin: expected[name] for twin, name in mapping.twins.items() if twin in found
    }
    problems = [f"missing {name} {allowed[name]}" for name in allowed if name not in found]
    problems += [f"extra {name} {found[name]}" for name in sorted(found.keys() - allowed.keys())]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in allowed.items()
        if name in found and found[name] != shape
    ]
    problems += [
        f"{name} has type {kind}, expected a floating point type; save the model unquantized"
        for name, kind in tensors.unreadable_types().items()
    ]
    return problems


def _shape_problem(own: Owned) -> str | None:
    expected = local_shape(own.entry.row, tp=get_pg_size(own.tp_group))
    found = tuple(own.parameter.shape)
    return None if found == expected else f"{own.name} has shape {found}, expected {expected}"


def _fill(own: Owned, tensors: TensorFolder, *, mapping: Mapping) -> None:
    twins = {name: twin for twin, name in mapping.twins.items() if twin in tensors.slices}

    def read(index: int, where: tuple[slice, ...]) -> Tensor:
        name = own.entry.sources[index].name
        tensor = tensors.read(name, where)
        twin = twins.get(name)
        if twin is not None and not torch.equal(tensor, tensors.read(twin, where)):
            raise ValueError(
                f"{twin} in {tensors.path} differs from {name}, but the config ties the two; "
                "set tie_word_embeddings to false to train them apart."
            )
        return tensor

    local = read_local(
        own.entry.row, read, rank=get_pg_rank(own.tp_group), tp=get_pg_size(own.tp_group)
    )
    with torch.no_grad():
        own.parameter.copy_(local)
