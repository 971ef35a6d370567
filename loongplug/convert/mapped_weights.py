"""Weights that stay in a checkpoint's mapped files until they are asked for.

Memory that a process touches for the first time can cost as much as reading the disk, and a
conversion needs each weight once.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from loongplug.platform.safe_reading import DamagedFileError

_TENSOR = LoadItemType.TENSOR


class _Part(NamedTuple):
    """A box of a parameter's values, and the bytes of them in a mapped file."""

    place: Tensor  # a view of the parameter, whose own memory stays unused
    saved: Tensor  # uint8 [*shape of the place, bytes of a value]
    file: Path

    def fetch(self) -> None:
        """Have the system read the bytes ahead; page by page as they are touched is slower."""
        steps = zip(self.saved.shape, self.saved.stride(), strict=True)
        length = 1 + sum((size - 1) * step for size, step in steps)
        with self.file.open("rb") as file:
            start = int(self.saved.storage_offset())
            os.posix_fadvise(file.fileno(), start, int(length), os.POSIX_FADV_WILLNEED)


class MappingReader(FileSystemReader):
    """Torch's reader, which leaves in the files what they hold as it is, and reads the rest.

    Then it gives the values of one parameter at a time. A file is mapped, not read: one that is cut
    off while the conversion runs ends it.
    """

    def __init__(self, folder: Path, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` are those that may stay in the files of ``folder``."""
        super().__init__(folder)
        self._folder = folder
        self._of_memory = {each.untyped_storage().data_ptr(): each for each in parameters}
        self._files: dict[str, Tensor] = {}
        self._parts: dict[nn.Parameter, list[_Part]] = {}
        self._latest: tuple[nn.Parameter, Tensor] | None = None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Map each parameter whose boxes all lie in the files as they are, and read the others."""
        left: list[ReadItem] = []
        needed: dict[nn.Parameter, list[tuple[ReadItem, Tensor]]] = {}
        for item in plan.items:
            place = planner.resolve_tensor(item).detach() if item.type is _TENSOR else None
            memory = 0 if place is None else place.untyped_storage().data_ptr()
            if place is None or memory not in self._of_memory:
                left.append(item)
            else:
                needed.setdefault(self._of_memory[memory], []).append((item, place))
        for parameter, items in needed.items():
            values = sum(place.numel() for _, place in items)
            if values != parameter.numel():
                raise DamagedFileError(
                    f"The checkpoint {self._folder} has {values} of the {parameter.numel()} values "
                    f"of {items[0][0].dest_index.fqn}: save it again."
                )
            parts = [part for each in items if (part := self._part(*each)) is not None]
            if len(parts) == len(items):
                self._parts[parameter] = parts
            else:
                left += [item for item, _ in items]
        return super().read_data(LoadPlan(left), planner)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's values: in the mapped file where they are in one piece, else copied.

        A copy is kept until another parameter is asked for.
        """
        if parameter not in self._parts:
            return parameter.data
        if self._latest is not None and self._latest[0] is parameter:
            return self._latest[1]
        self._latest = None  # before there is another one
        parts = self._parts[parameter]
        for part in parts:
            part.fetch()
        whole = _as_they_are(parts, parameter)
        if whole is None:
            whole = _put_together(parts, parameter)
        self._latest = (parameter, whole)
        return whole

    def _part(self, item: ReadItem, place: Tensor) -> _Part | None:
        """The bytes of a place in the mapped file.

        None where they do not lie there as they are: they were packed, have another dtype or
        another order, or the record is damaged.
        """
        stored = self.storage_data[item.storage_index]
        if stored.transform_descriptors:
            return None
        with (self._folder / stored.relative_path).open("rb") as file:
            try:
                view: Any = _create_file_view(file, stored.offset, stored.length)
                # Reads the record's description, not its values.
                saved = torch.load(view, map_location="meta", weights_only=True)
            except Exception:  # whatever it is, reading all of it will raise it, too
                return None
        if not isinstance(saved, Tensor) or saved.dtype != place.dtype:
            return None
        ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
        box = tuple(map(slice, item.storage_offsets, ends))
        start = getattr(saved.untyped_storage(), "_checkpoint_offset", None)
        if start is None or not saved.is_contiguous() or saved[box].shape != place.shape:
            return None
        start += stored.offset + saved.storage_offset() * saved.itemsize
        if start + saved.nbytes > stored.offset + stored.length:
            return None
        file_bytes = self._mapped(stored.relative_path)[start : start + saved.nbytes]
        found = file_bytes.view(*saved.shape, saved.itemsize)[box]
        return _Part(place, found, self._folder / stored.relative_path)

    def _mapped(self, name: str) -> Tensor:
        """All bytes of a file, to be read only."""
        if name not in self._files:
            path = self._folder / name
            # Not torch.from_file: what may be written to counts as memory that has to be there,
            # and a file may be larger than that.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's, of read-only memory
                self._files[name] = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r"))
        return self._files[name]


def _as_they_are(parts: Sequence[_Part], parameter: nn.Parameter) -> Tensor | None:
    """The values within the file; None where numbers cannot be read from there."""
    (place, saved, _), *others = parts
    if others or not (place.is_contiguous() and saved.is_contiguous()):
        return None
    if saved.storage_offset() % place.itemsize:
        return None
    return saved.view(-1).view(place.dtype).view(parameter.shape)


def _put_together(parts: Sequence[_Part], parameter: nn.Parameter) -> Tensor:
    whole = torch.empty_like(parameter.data)
    start = parameter.storage_offset()
    for part in parts:
        place = part.place
        target = whole.as_strided(place.shape, place.stride(), place.storage_offset() - start)
        # Bytes, since the file's may begin anywhere.
        target.unsqueeze(-1).view(torch.uint8).copy_(part.saved)
    return whole
