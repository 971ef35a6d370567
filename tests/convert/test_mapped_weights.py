"""Parameters that stay in a checkpoint's files: which ones, and that every bit is the right one."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from loongplug.convert.mapped_weights import MappingReader

pytestmark = pytest.mark.quick

FILE = "__0_0.distcp"
WHOLE = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).bfloat16()


def write(
    folder: Path, boxes: dict[tuple[int, ...], Tensor], *, shift: int = 0, **how: Any
) -> None:
    """A checkpoint of one tensor, saved in ``boxes`` by offset; its items begin ``shift`` later."""
    dtype = next(iter(boxes.values())).dtype
    ends = [map(sum, zip(at, box.shape, strict=True)) for at, box in boxes.items()]
    stored: dict[MetadataIndex, _StorageInfo] = {}
    with (folder / FILE).open("wb") as file:
        for at, box in boxes.items():
            file.write(b"x" * (64 - file.tell() % 64 + shift))
            start = file.tell()
            torch.save(box, file, **how)
            stored[MetadataIndex("weight", at)] = _StorageInfo(FILE, start, file.tell() - start)
    described = TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(max(axis) for axis in zip(*ends, strict=True)),
        chunks=[ChunkStorageMetadata(torch.Size(at), box.shape) for at, box in boxes.items()],
    )
    metadata = Metadata(state_dict_metadata={"weight": described}, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def mapped(folder: Path, parameter: nn.Parameter, *, at: tuple[int, int]) -> MappingReader:
    """The reader after a load of the box that begins there, as torch plans it."""
    reader = MappingReader(folder, [parameter])
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    box = ChunkStorageMetadata(torch.Size(at), parameter.shape)
    items = create_read_items_for_chunk_list(
        "weight", metadata.state_dict_metadata["weight"], [box]
    )
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: narrow_tensor_by_index(
            parameter.data, item.dest_offsets, item.lengths
        ),
        commit_tensor=lambda item, tensor: None,
    )
    reader.read_data(LoadPlan(items), planner).wait()
    return reader


def in_the_file(tensor: Tensor, folder: Path) -> bool:
    return tensor.untyped_storage().nbytes() == (folder / FILE).stat().st_size


@pytest.mark.parametrize(("start", "rows"), [(0, 12), (4, 4)])
def test_rows_of_a_saved_box_stay_in_the_file(tmp_path, start, rows):
    write(tmp_path, {(0, 0): WHOLE})
    parameter = empty(rows, 6)
    found = mapped(tmp_path, parameter, at=(start, 0)).weight(parameter)
    assert torch.equal(found, WHOLE[start : start + rows])
    assert in_the_file(found, tmp_path)
    assert parameter.isnan().all()  # whose memory is not touched


def test_numbers_at_an_odd_address_are_copied(tmp_path):
    """What computes with them may count on whole numbers of values."""
    write(tmp_path, {(0, 0): WHOLE}, shift=1)
    parameter = empty(12, 6)
    found = mapped(tmp_path, parameter, at=(0, 0)).weight(parameter)
    assert torch.equal(found, WHOLE)
    assert found.data_ptr() % 2 == 0
    assert not in_the_file(found, tmp_path)


@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_of_several_boxes_are_put_together(tmp_path, shift):
    """Other cuts along both axes than those that were saved."""
    boxes = {(row, column): WHOLE[row : row + 5, column : column + 4].clone()
             for row in (0, 5, 10) for column in (0, 4)}  # fmt: skip
    write(tmp_path, boxes, shift=shift)
    parameter = empty(7, 3)
    reader = mapped(tmp_path, parameter, at=(4, 2))
    assert torch.equal(reader.weight(parameter), WHOLE[4:11, 2:5])
    assert reader.weight(parameter) is reader.weight(parameter)  # asked for once per source
    assert parameter.isnan().all()


@pytest.mark.parametrize(
    ("saved", "how"),
    [
        (WHOLE.t().contiguous().t(), {}),
        (WHOLE.float(), {}),
        (WHOLE, {"_use_new_zipfile_serialization": False}),
    ],
    ids=["turned", "another-dtype", "another-format"],
)
def test_what_does_not_lie_there_as_it_is_is_read(tmp_path, saved, how):
    write(tmp_path, {(0, 0): saved}, **how)
    parameter = empty(12, 6)
    found = mapped(tmp_path, parameter, at=(0, 0)).weight(parameter)
    assert found.data_ptr() == parameter.data_ptr()
    assert torch.equal(found, WHOLE)


def test_values_that_nobody_saved_are_refused(tmp_path):
    write(tmp_path, {(0, 0): WHOLE[:4].clone(), (8, 0): WHOLE[8:].clone()})
    with pytest.raises(ValueError, match="has 48 of the 72 values of weight"):
        mapped(tmp_path, empty(12, 6), at=(0, 0))
