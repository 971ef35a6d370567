"""Safetensors files written as their tensors arrive, with nothing kept in memory.

The layout of a file (its header) is planned before any tensor is there. That is what the
``safetensors`` library has no function for; reading, here and everywhere, is the library's.
Format: https://huggingface.co/docs/safetensors/index#format
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from loongplug.checkpoint.tensor_folder import FLOATS, INDEX_FILE, WEIGHTS_FILE
from loongplug.models.hf_mapping import Shape

_METADATA = {"format": "pt", "written_by": "loongplug"}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file, with its tensors in the order in which they will be written."""

    name: str
    tensors: tuple[PlannedTensor, ...]


def plan_files(
    bundles: Iterable[Sequence[PlannedTensor]], *, max_bytes: int
) -> tuple[PlannedFile, ...]:
    """Deal tensors out to files of at most ``max_bytes``, in order; a bundle stays together.

    A bundle that is larger than that has a file of its own. One file is enough for a small
    model, and then bears the name that needs no index.
    """
    files: list[list[PlannedTensor]] = [[]]
    size = 0
    for bundle in bundles:
        nbytes = sum(tensor.nbytes for tensor in bundle)
        if files[-1] and size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].extend(bundle)
        size += nbytes
    if len(files) == 1:
        return (PlannedFile(WEIGHTS_FILE, tuple(files[0])),)
    return tuple(
        PlannedFile(f"model-{number:05d}-of-{len(files):05d}.safetensors", tuple(tensors))
        for number, tensors in enumerate(files, start=1)
    )


def write_index(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write the index of several files; one file has none."""
    if len(files) == 1:
        return
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor, _ in tensors)},
        "weight_map": {tensor.name: file for tensor, file in tensors},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorFileWriter:
    """Writes one planned file, which the disk has when it is left; a context manager."""

    def __init__(self, folder: Path, plan: PlannedFile) -> None:
        self._expected = iter(plan.tensors)
        self._digest = hashlib.sha256()
        self._file: BinaryIO = (folder / plan.name).open("wb")
        self._write(_header(plan))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    @property
    def digest(self) -> str:
        """The sha256 of what was written so far."""
        return self._digest.hexdigest()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; names come in the order of the plan."""
        planned = next(self._expected, None)
        found = PlannedTensor(name, tuple(tensor.shape), tensor.dtype)
        assert found == planned, (found, planned)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._write(memoryview(data.numpy()))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def _header(plan: PlannedFile) -> bytes:
    codes = {dtype: code for code, dtype in FLOATS.items()}
    header: dict[str, object] = {"__metadata__": _METADATA}
    start = 0
    for tensor in plan.tensors:
        header[tensor.name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
