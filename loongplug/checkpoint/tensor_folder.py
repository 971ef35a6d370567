"""The safetensors files of a Hugging Face folder, opened lazily and read slice by slice."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loongplug.models.hf_mapping import Shape

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class TensorFolder:
    """All tensors of a folder by name; counts what is read of them."""

    def __init__(self, path: Path, slices: dict[str, Any]) -> None:
        self.path = path
        self.slices = slices  # safetensors' lazy slices
        self.bytes_read = 0

    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor; reads headers only."""
        return {name: tuple(view.get_shape()) for name, view in self.slices.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Name and dtype of every tensor that is plain floating point numbers."""
        types = {name: view.get_dtype() for name, view in self.slices.items()}
        return {name: FLOATS[kind] for name, kind in types.items() if kind in FLOATS}

    def unreadable_types(self) -> dict[str, str]:
        """Tensors that are no plain floating point numbers, with their type."""
        types = {name: view.get_dtype() for name, view in self.slices.items()}
        return {name: str(kind) for name, kind in types.items() if kind not in FLOATS}

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """One slice of a tensor, on the CPU; only that slice is read."""
        tensor: Tensor = self.slices[name][where]
        self.bytes_read += tensor.nbytes
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFolder]:
    """Open the safetensors files of ``folder`` for as long as the context lasts.

    Raises:
        ValueError: there is no folder, no safetensors file in it, or a damaged one.
    """
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{file} cannot be read as safetensors ({error}): copy the file anew."
                ) from error
            slices.update((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118
        yield TensorFolder(folder, slices)


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"No Hugging Face model at {folder}: give the path of a local folder.")
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / WEIGHTS_FILE
        if not single.is_file():
            raise ValueError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats are not "
                "read. Save the model with transformers' save_pretrained, which writes them."
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of safetensors files ({error!r}): copy the file anew."
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} points outside its folder, to {name!r}: it must not.")
        if not (folder / name).is_file():
            raise ValueError(f"{index} lists {name}, which is not in {folder}: copy it there.")
    return [folder / name for name in names]
