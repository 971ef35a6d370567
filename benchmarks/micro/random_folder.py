"""A Hugging Face folder of random weights, as large as the published one."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from loongplug.verify.tiny_processor import write_processor

_BLOCK = 2**23  # values drawn once and written over and over, from another place each time


def write_random_folder(
    folder: Path,
    *,
    model_name: str,
    overrides: Sequence[str] = (),
    processor: Callable[[Path], None] = write_processor,
) -> None:
    """Write the model's tensors in bf16, its config, and a tiny processor."""
    from loongplug.checkpoint.safetensors_folder import (
        PlannedTensor,
        new_tensor_file,
        plan_files,
        write_index,
    )
    from loongplug.models.hf_config import hf_config
    from loongplug.training.config import compose_model
    from loongplug.training.special_tokens import read_tokenizer, with_token_ids

    folder.mkdir(parents=True)
    processor(folder)
    composed = compose_model(model_name=model_name, overrides=overrides)
    config = with_token_ids(
        composed.config, read_tokenizer(folder), special_tokens=composed.family.special_tokens
    )
    model = composed.family.load_hugging_face(config)
    exported = hf_config(model)
    exported.dtype = torch.bfloat16
    exported.save_pretrained(folder)
    files = plan_files(
        [
            [PlannedTensor(source.name, source.shape, torch.bfloat16) for source in bundle.sources]
            for bundle in model.mapping.bundles()
        ],
        max_bytes=5 * 1024**3,
    )
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * _BLOCK, generator=generator).bfloat16()
    for file in files:
        with new_tensor_file(folder, file) as add:
            for tensor in file.tensors:
                start = int(torch.randint(_BLOCK, (1,), generator=generator))
                add(tensor.name, _filled(tensor.shape, values[start : start + _BLOCK]))
    write_index(folder, files)


def _filled(shape: tuple[int, ...], block: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(torch.Size(shape).numel(), dtype=block.dtype)
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])
    return flat.view(shape)
