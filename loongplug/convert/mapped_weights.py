"""Weights that stay in a checkpoint's mapped files until they are asked for.

Memory that a process touches for the first time can cost as much as reading the disk, and a
conversion needs each weight once.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from loongplug.checkpoint.whole import described_files


@dataclass(frozen=True)
class _Part:
    """A box of a parameter's values, and the bytes of them in a mapped file."""

    place: Tensor  # a view of the parameter, whose own memory stays unused
    saved: Tensor  # uint8 [*shape of the place, bytes of a value]
    file: Path

    def fetch(self) -> None:
        """Have the system read the bytes ahead; page by page as they are touched is slower."""
        if not hasattr(os, "posix_fadvise"):
            return
        last = sum(
            (size - 1) * step
            for size, step in zip(self.saved.shape, self.saved.stride(), strict=True)
        )
        start, length = int(self.saved.storage_offset()), int(last) + 1
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _Chunks:
    """The boxes in which a tensor was saved."""

    all: Sequence[ChunkStorageMetadata]
    begins: Tensor  # [boxes, axes]
    ends: Tensor  # [boxes, axes]

    @classmethod
    def of(cls, chunks: Sequence[ChunkStorageMetadata]) -> "_Chunks":
        begins = torch.tensor([list(chunk.offsets) for chunk in chunks], dtype=torch.long)
        sizes = torch.tensor([list(chunk.sizes) for chunk in chunks], dtype=torch.long)
        return cls(chunks, begins, begins + sizes)

    def overlaps(
        self, begin: Sequence[int], end: Sequence[int]
    ) -> list[tuple[ChunkStorageMetadata, list[int], list[int]]]:
        """Each box that shares something with the given one, with the begin and end of that."""
        begins = torch.maximum(self.begins, torch.tensor(begin, dtype=torch.long))
        ends = torch.minimum(self.ends, torch.tensor(end, dtype=torch.long))
        shared = (begins < ends).all(1).nonzero().flatten().tolist()
        return [(self.all[box], begins[box].tolist(), ends[box].tolist()) for box in shared]


class MappedWeights:
    """The parameters that a checkpoint's files hold as they are, one at a time on request.

    A file is mapped, not read: one that is cut off while the conversion runs ends it.
    """

    def __init__(self, folder: Path) -> None:
        """Learn what lies where in the files of ``folder``; no collectives.

        Raises:
            ValueError: the checkpoint's description cannot be read, or a file is missing or cut
                off.
        """
        self._folder = folder
        metadata = described_files(folder)
        self._described = metadata.state_dict_metadata
        self._stored = metadata.storage_data
        self._chunks: dict[str, _Chunks] = {}
        self._files: dict[str, Tensor] = {}
        self._parts: dict[nn.Parameter, list[_Part]] = {}
        self._latest: tuple[nn.Parameter, Tensor] | None = None

    def add(self, parameter: nn.Parameter, shards: Sequence[ShardedTensor]) -> bool:
        """Leave ``parameter`` in the files; False where they do not hold it as it is.

        ``shards`` are views of the parameter that cover it.

        Raises:
            ValueError: the checkpoint lacks some of the values.
        """
        parts = [part for shard in shards for part in self._parts_of(shard)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return False
        self._parts[parameter] = found
        return True

    def __call__(self, parameter: nn.Parameter) -> Tensor:
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
        whole = _as_they_are(parts[0], parameter) if len(parts) == 1 else None
        if whole is None:
            whole = _put_together(parts, parameter)
        self._latest = (parameter, whole)
        return whole

    def _parts_of(self, shard: ShardedTensor) -> list[_Part | None]:
        """One for each saved box that overlaps the shard; None for a box that cannot be mapped."""
        assert shard.data is not None
        if shard.key not in self._chunks:
            self._chunks[shard.key] = _Chunks.of(self._described[shard.key].chunks)
        extra = shard.prepend_axis_num
        begin = shard.global_offset
        shape = (*(1 for _ in range(extra)), *shard.local_shape)
        end = [first + size for first, size in zip(begin, shape, strict=True)]
        parts: list[_Part | None] = []
        values = 0
        for chunk, shared_begin, shared_end in self._chunks[shard.key].overlaps(begin, end):
            place = shard.data.detach()[_slices(shared_begin, shared_end, begin)[extra:]]
            values += place.numel()
            stored = self._stored[MetadataIndex(shard.key, chunk.offsets)]
            item = self._item(stored, sizes=chunk.sizes, dtype=shard.dtype)
            if item is None:
                parts.append(None)
                continue
            saved = item[_slices(shared_begin, shared_end, chunk.offsets)][(0,) * extra]
            parts.append(_Part(place, saved, self._folder / stored.relative_path))
        if values != shard.data.numel():
            raise ValueError(
                f"The checkpoint {self._folder} has {values} of the {shard.data.numel()} values of "
                f"{shard.key} at {tuple(begin)}: save it again."
            )
        return parts

    def _item(self, stored: Any, *, sizes: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """The bytes of a saved box, [*its shape, bytes of a value], in the mapped file.

        None where they do not lie there as they are: they were packed, have another dtype or
        another order, or the record is damaged.
        """
        if stored.transform_descriptors:
            return None
        with (self._folder / stored.relative_path).open("rb") as file:
            try:
                view: Any = _create_file_view(file, stored.offset, stored.length)
                # Reads the record's description, not its values.
                saved = torch.load(view, map_location="meta", weights_only=True)
            except Exception:  # whatever it is, reading all of it will raise it, too
                return None
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (sizes, dtype):
            return None
        start = getattr(saved.untyped_storage(), "_checkpoint_offset", None)
        if start is None or not saved.is_contiguous():
            return None
        start += stored.offset + saved.storage_offset() * dtype.itemsize
        if start + saved.nbytes > stored.offset + stored.length:
            return None
        file_bytes = self._mapped(stored.relative_path)
        return file_bytes[start : start + saved.nbytes].view(*sizes, dtype.itemsize)

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


def _slices(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """The box from ``begin`` to ``end`` as seen from ``origin``."""
    return tuple(
        slice(first - zero, last - zero)
        for first, last, zero in zip(begin, end, origin, strict=True)
    )


def _as_they_are(part: _Part, parameter: nn.Parameter) -> Tensor | None:
    """The values within the file; None where numbers cannot be read from there."""
    place, saved = part.place, part.saved
    if not (place.is_contiguous() and saved.is_contiguous()):
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
