"""Which slices of Hugging Face tensors make a tensor parallel rank's parameter, there and back.

Splitting works on a row's parts and packing on what is left of them, so the same two steps serve a
single rank and any tensor-parallel size, weights and gradients, and both directions. Everything
here is pure and linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from math import prod
from typing import TYPE_CHECKING

from loongplug.models.hf_mapping import MappedParameter, Row, Shape, Source, Split, Where

if TYPE_CHECKING:
    from torch import Tensor


def local_shape(row: Row, *, tp: int) -> Shape:
    """The shape of our parameter on each of ``tp`` ranks.

    Parts are stacked, axes behind the second folded into it, unless the row keeps them.
    """
    trailing = row.sources[0].matrix[1:]
    kept = (prod(trailing),) if row.folded and trailing else trailing
    shape = [sum(source.matrix[0] for source in row.sources), *kept]
    if row.split is Split.NONE:
        return tuple(shape)
    axis = _split_axis(row)
    pieces, what = row.groups, "groups of heads"
    if row.groups == 1:
        pieces, what = _part_bounds(row.sources[0], 0)[axis][1], "columns" if axis else "rows"
    if pieces % tp:
        raise ValueError(
            f"{row.names[0]}: {pieces} {what} cannot be split over {tp} tensor parallel ranks; "
            f"choose a size that divides {pieces}"
        )
    shape[axis] //= tp
    return tuple(shape)


def _split_axis(row: Row) -> int:
    return 1 if row.split is Split.ROW else 0


def _part_bounds(source: Source, part: int) -> list[tuple[int, int]]:
    """Start and stop of a part in its source's matrix, axis by axis."""
    length = source.matrix[0] // source.parts
    return [(part * length, (part + 1) * length), *((0, size) for size in source.matrix[1:])]


def _regions(row: Row, *, rank: int, tp: int) -> Iterator[tuple[int | None, Source, Where]]:
    """The slice of every part's matrix that rank ``rank`` of ``tp`` holds.

    With the source, and which of those in files it is, if any.
    """
    in_files = count()
    for source in row.sources:
        index = None if source.absent else next(in_files)
        for part in range(source.parts):
            bounds = _part_bounds(source, part)
            if row.split is not Split.NONE:
                axis = _split_axis(row)
                start, stop = bounds[axis]
                piece = (stop - start) // tp
                bounds[axis] = (start + rank * piece, start + (rank + 1) * piece)
            yield index, source, tuple(slice(*bound) for bound in bounds)


def read_local(
    entry: MappedParameter, read: Callable[[int, Where], Tensor], *, rank: int, tp: int
) -> Tensor:
    """The local parameter of tensor parallel rank ``rank``, reading no more than that needs.

    ``read`` gives ``tensor[where]`` of the row's n-th Hugging Face tensor.
    """
    row = entry.row
    regions = list(_regions(row, rank=rank, tp=tp))
    found = [
        None
        if index is None
        else source.to_matrix(read(index, source.in_file(where, expert=entry.expert)))
        for index, source, where in regions
    ]
    like = next(part for part in found if part is not None)
    parts = [
        like.new_zeros(_lengths(where)) if part is None else part
        for part, (_, _, where) in zip(found, regions, strict=True)
    ]
    shape = local_shape(row, tp=tp)
    if len(parts) == 1:
        return parts[0].reshape(shape)
    import torch  # not above: commands that end at a wrong key need none

    # Per group, that group's rows of every part.
    groups = _local_groups(row, tp)
    return torch.cat([part.reshape(groups, len(part) // groups, -1) for part in parts], 1).reshape(
        shape
    )


def parts_of_local(
    entry: MappedParameter, local: Tensor, *, source: int, rank: int, tp: int
) -> list[tuple[Where, Tensor]]:
    """Undo :func:`read_local`: what of ``local`` belongs to the row's n-th Hugging Face tensor.

    That is where it lies there, and the part itself, a view of ``local`` wherever one will do.
    """
    row = entry.row
    regions = list(_regions(row, rank=rank, tp=tp))
    groups = _local_groups(row, tp)
    lengths = [_lengths(where)[0] // groups for _, _, where in regions]
    grouped = local.unflatten(0, (groups, sum(lengths)))
    found = []
    for (index, tensor, where), part in zip(regions, grouped.split(lengths, 1), strict=True):
        if index == source:
            matrix = part.reshape(_lengths(where))
            spot = tensor.in_file(where, expert=entry.expert)
            found.append((spot, tensor.from_matrix(matrix)))
    return found


def _lengths(where: Where) -> list[int]:
    return [bound.stop - bound.start for bound in where]


def _local_groups(row: Row, tp: int) -> int:
    return row.groups // tp if row.split is Split.COLUMN and row.groups > 1 else row.groups
