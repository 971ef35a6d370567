"""The safetensors files of a Hugging Face folder: read slice by slice, written tensor by tensor.

Files are opened lazily, by the ``safetensors`` library. They are written as their tensors arrive,
with nothing kept in memory, so the layout of a file (its header) is planned before any tensor is
there: that is what the library has no function for.
Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loongplug.models.hf_mapping import Shape
from loongplug.platform.finite_values import is_finite

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_NONE: Mapping[str, Shape] = MappingProxyType({})
_METADATA = {"format": "pt", "written_by": "loongplug"}
_HEADER_ALIGNMENT = 8


class TensorFolder:
    """All tensors of a folder by name, with the files they lie in; counts what is read of them.

    ``turnable`` are tensors whose last two axes may stand the other way round, with the shape that
    they should have; those that do are turned as they are read.
    """

    def __init__(
        self,
        path: Path,
        slices: dict[str, Any],
        *,
        files: Mapping[str, Path],
        turnable: Mapping[str, Shape] = _NONE,
    ) -> None:
        self.path = path
        self.slices = slices  # safetensors' lazy slices
        self._files = files
        self.bytes_read = 0
        self._turned: frozenset[str] = frozenset()
        found = self.shapes()
        self._turned = frozenset(
            name
            for name, shape in turnable.items()
            if name in found and found[name] != shape and _swapped(found[name]) == shape
        )

    def shapes(self) -> dict[str, Shape]:
        """Name and shape (after turning) of every tensor; reads headers only."""
        shapes = {name: tuple(view.get_shape()) for name, view in self.slices.items()}
        return shapes | {name: _swapped(shapes[name]) for name in self._turned}

    def types(self) -> dict[str, str]:
        """Name and type of every tensor, as files call it; those of ``FLOATS`` can be read."""
        return {name: str(view.get_dtype()) for name, view in self.slices.items()}

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """One slice of a tensor, on the CPU; only that slice is read.

        ValueError where it has a value that is NaN or infinite.
        """
        turned = name in self._turned
        tensor: Tensor = self.slices[name][_swapped(where) if turned else where]
        self.bytes_read += tensor.nbytes
        check_finite(name, tensor, file=self._files[name])
        return tensor.transpose(-1, -2) if turned else tensor


def present_name(name: str, formerly: Sequence[tuple[str, str]]) -> str:
    """``name`` with the beginning that stands for its former one, where it has that."""
    for before, present in formerly:
        if name.startswith(before):
            return present + name.removeprefix(before)
    return name


def shape_problems(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """What is missing of the tensors that are expected, what is there beside them, or misshapen."""
    problems = [f"missing {name} {expected[name]}" for name in expected if name not in found]
    problems += [f"extra {name} {found[name]}" for name in sorted(found.keys() - expected)]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return problems


def check_finite(name: str, tensor: Tensor, *, file: Path) -> None:
    """ValueError where what was read of a tensor has a value that is NaN or infinite."""
    if not is_finite(tensor):
        raise ValueError(
            f"{name} in {file} has values that are NaN or infinite: its training had failed, or "
            "the file is damaged. Load an earlier checkpoint, or copy the file again."
        )


def _swapped[T](axes: tuple[T, ...]) -> tuple[T, ...]:
    return (*axes[:-2], *axes[:-3:-1])


@contextmanager
def open_tensors(
    folder: Path,
    *,
    turnable: Mapping[str, Shape] = _NONE,
    formerly: Sequence[tuple[str, str]] = (),
    aside: tuple[str, ...] = (),
) -> Iterator[TensorFolder]:
    """Open the safetensors files of ``folder`` for as long as the context lasts.

    ``turnable`` as in :class:`TensorFolder`; ``formerly`` are beginnings of names that the files
    may have in place of others: the tensors are known by the latter. Tensors whose names begin with
    one of ``aside`` are another model's and left out.
    """
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        files: dict[str, Path] = {}
        places = _index(folder)
        for file in [WEIGHTS_FILE] if places is None else sorted({*places.values()}):
            path = folder / file
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} cannot be read as safetensors ({error}): copy the file again."
                ) from error
            for name in handle.keys():  # noqa: SIM118
                if places is not None and places.get(name) != file:
                    raise ValueError(
                        f"{path} has a tensor {name}, which {INDEX_FILE} has in "
                        f"{places.get(name, 'no file')}: copy index and files again, together."
                    )
                if name.startswith(aside):
                    continue
                known_as = present_name(name, formerly)
                if known_as in slices:
                    raise ValueError(
                        f"{folder} has {known_as} twice, once by the name that other versions of "
                        "transformers give it: save the model again, or delete the older files."
                    )
                slices[known_as] = handle.get_slice(name)
                files[known_as] = path
        yield TensorFolder(folder, slices, files=files, turnable=turnable)


def _index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by the index; None where the folder has one file alone."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not folder.is_dir():
            raise ValueError(f"No Hugging Face model at {folder}: give the path of a local folder.")
        if not (folder / WEIGHTS_FILE).is_file():
            raise ValueError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats are not "
                "read. Save the model with transformers' save_pretrained, which writes them."
            )
        return None
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not an index of safetensors files ({error!r}): copy the file again."
        ) from error
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} points outside its folder, to {name!r}: it must not.")
        if not (folder / name).is_file():
            raise ValueError(f"{index} lists {name}, which is not in {folder}: copy it there.")
    return places


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


@contextmanager
def new_tensor_file(folder: Path, plan: PlannedFile) -> Iterator[Callable[[str, Tensor], None]]:
    """One planned file, which the disk has when the context ends; what writes its next tensor."""
    expected = iter(plan.tensors)
    with (folder / plan.name).open("wb") as file:
        file.write(_header(plan))

        def add(name: str, tensor: Tensor) -> None:
            planned = next(expected, None)
            found = PlannedTensor(name, tuple(tensor.shape), tensor.dtype)
            assert found == planned, (found, planned)
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(data.numpy()))

        yield add
        file.flush()
        os.fsync(file.fileno())


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
