"""A Hugging Face folder of random weights in which a wrong slice shows."""

import json
import zlib
from math import prod, sqrt
from pathlib import Path

import torch

from loongplug.checkpoint.safetensors_folder import (
    PlannedFile,
    PlannedTensor,
    new_tensor_file,
    plan_files,
    write_index,
)
from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_mapping import Source
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.lora.peft_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    peft_config,
)

_SPREAD = 0.1  # of norms around 1, and of biases around 0
_MAX_FILE_BYTES = 5 * 1024**3


def write_random_weights(folder: Path, model: HuggingFaceModel, *, seed: int) -> None:
    """Write fp32 weights; the same seed gives the same weights.

    There is no ``config.json``: transformers need not have the model.
    """
    folder.mkdir(parents=True)
    sources = {s.name: s for bundle in model.mapping.bundles() for s in bundle.sources}
    tensors = [[PlannedTensor(s.name, s.shape, torch.float32)] for s in sources.values()]
    files = plan_files(tensors, max_bytes=_MAX_FILE_BYTES)
    for file in files:
        with new_tensor_file(folder, file) as add:
            for tensor in file.tensors:
                add(tensor.name, random_tensor(sources[tensor.name], seed=seed))
    write_index(folder, files)


def write_random_adapters(folder: Path, table: AdapterTable, *, seed: int) -> None:
    """Write fp32 adapters as ``peft`` would; the same seed gives the same values."""
    folder.mkdir(parents=True)
    tensors = [
        (name, source)
        for bundle in table.mapping.bundles()
        for source in bundle.sources
        for name in table.file_names(bundle, source)
    ]
    planned = tuple(
        PlannedTensor(name, table.file_shape(source), torch.float32) for name, source in tensors
    )
    with new_tensor_file(folder, PlannedFile(ADAPTER_WEIGHTS_FILE, planned)) as add:
        for name, source in tensors:
            add(name, table.to_file(source, random_tensor(source, seed=seed)))
    config = json.dumps(peft_config(table, base=None), indent=2) + "\n"
    (folder / ADAPTER_CONFIG_FILE).write_text(config, encoding="utf-8")


def random_tensor(source: Source, *, seed: int) -> torch.Tensor:
    """A tensor that depends on its name and the seed only, with no values at 0 or 1."""
    # torch takes 32 bits of a seed on the CPU.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {source.name}".encode()))
    values = torch.randn(source.shape, generator=generator)
    if len(source.matrix) == 1:
        return _SPREAD * values + (0.0 if source.name.endswith("bias") else 1.0)
    return values / sqrt(prod(source.matrix[1:]))
