"""Parameters that stay in a checkpoint's files: which ones, and that every bit is the right one."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from loongplug.convert.mapped_weights import MappedWeights

pytestmark = pytest.mark.quick

FILE = "__0_0.distcp"
WHOLE = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).bfloat16()


def write(
    folder: Path, boxes: dict[tuple[int, ...], Tensor], *, shift: int = 0, **how: Any
) -> MappedWeights:
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
    return MappedWeights(folder)


def needed(
    data: Tensor, *, at: tuple[int, ...], of: tuple[int, ...], prepended: int = 0
) -> ShardedTensor:
    return ShardedTensor(
        key="weight",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=of,
        global_offset=at,
        axis_fragmentations=None,
        prepend_axis_num=prepended,
    )


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def in_the_file(tensor: Tensor, folder: Path) -> bool:
    return tensor.untyped_storage().nbytes() == (folder / FILE).stat().st_size


@pytest.mark.parametrize(("start", "rows"), [(0, 12), (4, 4)])
def test_rows_of_a_saved_box_stay_in_the_file(tmp_path, start, rows):
    weights = write(tmp_path, {(0, 0): WHOLE})
    parameter = empty(rows, 6)
    assert weights.add(parameter, [needed(parameter.data, at=(start, 0), of=(12, 6))])
    assert torch.equal(weights(parameter), WHOLE[start : start + rows])
    assert in_the_file(weights(parameter), tmp_path)
    assert parameter.isnan().all()  # whose memory is not touched


def test_numbers_at_an_odd_address_are_copied(tmp_path):
    """What computes with them may count on whole numbers of values."""
    weights = write(tmp_path, {(0, 0): WHOLE}, shift=1)
    parameter = empty(12, 6)
    assert weights.add(parameter, [needed(parameter.data, at=(0, 0), of=(12, 6))])
    assert torch.equal(weights(parameter), WHOLE)
    assert weights(parameter).data_ptr() % 2 == 0
    assert not in_the_file(weights(parameter), tmp_path)


@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_of_several_boxes_are_put_together(tmp_path, shift):
    """Other cuts along both axes than those that were saved."""
    boxes = {(row, column): WHOLE[row : row + 5, column : column + 4].clone()
             for row in (0, 5, 10) for column in (0, 4)}  # fmt: skip
    weights = write(tmp_path, boxes, shift=shift)
    parameter = empty(7, 3)
    assert weights.add(parameter, [needed(parameter.data, at=(4, 2), of=(12, 6))])
    assert torch.equal(weights(parameter), WHOLE[4:11, 2:5])


def test_halves_of_a_layer_are_put_together(tmp_path):
    """As gated projections are saved: all layers in one tensor, each half by itself."""
    layers = WHOLE.view(2, 6, 6)
    boxes = {(layer, row, 0): layers[layer : layer + 1, row : row + 3].clone()
             for row in (0, 3) for layer in (0, 1)}  # fmt: skip
    weights = write(tmp_path, boxes)
    first, second = empty(6, 6), empty(6, 6)
    for layer, parameter in enumerate((first, second)):
        shards = [
            needed(half, at=(layer, row, 0), of=(2, 6, 6), prepended=1)
            for row, half in zip((0, 3), parameter.data.chunk(2), strict=True)
        ]
        assert weights.add(parameter, shards)
    assert torch.equal(weights(second), layers[1])
    assert weights(second) is weights(second)  # its two halves are asked for one after the other
    assert torch.equal(weights(first), layers[0])
    assert torch.equal(weights(second), layers[1])


def test_what_is_needed_is_read_ahead(tmp_path, monkeypatch):
    """Of the file, from the first byte that is needed to the last."""
    weights = write(tmp_path, {(0, 0): WHOLE})
    parameter = empty(4, 2)
    assert weights.add(parameter, [needed(parameter.data, at=(4, 3), of=(12, 6))])
    asked: list[bytes] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append(os.pread(descriptor, length, start))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    weights(parameter)
    values = WHOLE.flatten()[4 * 6 + 3 : 7 * 6 + 5]
    assert asked == [values.view(torch.uint8).numpy().tobytes()]


def test_a_place_that_stands_the_other_way_round(tmp_path):
    weights = write(tmp_path, {(0, 0): WHOLE})
    parameter = empty(6, 12)
    assert weights.add(parameter, [needed(parameter.data.t(), at=(0, 0), of=(12, 6))])
    assert torch.equal(weights(parameter), WHOLE.t())


def described_as_wider(weights: MappedWeights) -> None:
    weights._described["weight"].chunks[0].sizes = WHOLE.shape


def packed(weights: MappedWeights) -> None:
    weights._stored[MetadataIndex("weight", (0, 0))].transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("saved", "how", "changed"),
    [
        (WHOLE.t().contiguous().t(), {}, None),
        (WHOLE.float(), {}, None),
        (WHOLE, {"_use_new_zipfile_serialization": False}, None),
        (WHOLE[:, :5].clone(), {}, described_as_wider),
        (WHOLE, {}, packed),
    ],
    ids=["turned", "another-dtype", "another-format", "another-shape", "packed"],
)
def test_what_does_not_lie_there_as_it_is_is_left_to_others(tmp_path, saved, how, changed):
    weights = write(tmp_path, {(0, 0): saved}, **how)
    if changed is not None:
        changed(weights)
    parameter = empty(12, 6)
    assert not weights.add(parameter, [needed(parameter.data, at=(0, 0), of=(12, 6))])
    assert weights(parameter).data_ptr() == parameter.data_ptr()


def test_values_that_nobody_saved_are_refused(tmp_path):
    weights = write(tmp_path, {(0, 0): WHOLE[:4].clone(), (8, 0): WHOLE[8:].clone()})
    parameter = empty(12, 6)
    with pytest.raises(ValueError, match="has 48 of the 72 values of weight"):
        weights.add(parameter, [needed(parameter.data, at=(0, 0), of=(12, 6))])


def test_files_that_are_cut_off_or_missing_are_refused(tmp_path):
    write(tmp_path, {(0, 0): WHOLE})
    file = tmp_path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"ends after {len(whole) - 1} of {len(whole)} bytes"):
        MappedWeights(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"lacks {FILE}"):
        MappedWeights(tmp_path)


def test_a_damaged_description_is_refused(tmp_path):
    write(tmp_path, {(0, 0): WHOLE})
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        MappedWeights(tmp_path)
