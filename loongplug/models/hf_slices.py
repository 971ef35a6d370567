"""Which slices of Hugging Face tensors make a tensor parallel rank's parameter, there and back.

Splitting works on a row's parts and packing on what is left of them, so the same two steps serve a
single rank and any tensor-parallel size, weights and gradients, and both directions. Everything
here is pure and linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import prod
from typing import TYPE_CHECKING

from loongplug.models.hf_mapping import MappedParameter, Row, Shape, Source, Split, Where

if TYPE_CHECKING:
    from torch import Tensor


def full_shape(row: Row) -> Shape:
    """The shape of our whole parameter: parts stacked, axes behind the second folded into it,
    unless the row keeps them.
    """
    rows = sum(source.matrix[0] for source in row.sources)
    return (rows, *_kept_axes(row.sources[0].matrix[1:], folded=row.folded))


def _kept_axes(trailing: Shape, *, folded: bool) -> Shape:
    """Axes behind the first, as our parameter has them."""
    return (prod(trailing),) if folded and trailing else tuple(trailing)


def local_shape(row: Row, *, tp: int) -> Shape:
    """The shape of our parameter on each of ``tp`` ranks.

    Raises:
        ValueError: the parameter does not split into ``tp`` equal pieces.
    """
    shape = list(full_shape(row))
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

    Args:
        read: gives ``tensor[where]`` of the row's n-th Hugging Face tensor.
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
    return pack(parts, groups=_local_groups(row, tp), folded=row.folded)


def parts_of_local(
    entry: MappedParameter, local: Tensor, *, source: int, rank: int, tp: int
) -> list[tuple[Where, Tensor]]:
    """Undo :func:`read_local` for the row's n-th Hugging Face tensor.

    Returns:
        what of ``local`` belongs to that tensor: where it lies there, and the part itself, a view
        of ``local`` wherever one will do.
    """
    row = entry.row
    regions = list(_regions(row, rank=rank, tp=tp))
    lengths = [_lengths(where)[0] for _, _, where in regions]
    parts = unpack(local, lengths, groups=_local_groups(row, tp))
    found = []
    for (index, tensor, where), part in zip(regions, parts, strict=True):
        if index == source:
            matrix = part.reshape(_lengths(where))
            spot = tensor.in_file(where, expert=entry.expert)
            found.append((spot, tensor.from_matrix(matrix)))
    return found


def _lengths(where: Where) -> list[int]:
    return [bound.stop - bound.start for bound in where]


def _local_groups(row: Row, tp: int) -> int:
    return row.groups // tp if row.split is Split.COLUMN and row.groups > 1 else row.groups


def pack(parts: Sequence[Tensor], *, groups: int, folded: bool = True) -> Tensor:
    """Interleave parts: per group, that group's rows of every part.

    Args:
        parts: each [groups * n, ...] with its own n.
        folded: trailing axes become one.

    Returns:
        [groups * sum of n, rest], or one axis when the parts have one; not ``folded``,
        [groups * sum of n, ...].
    """
    kept = _kept_axes(tuple(parts[0].shape[1:]), folded=folded)
    if len(parts) == 1:
        return parts[0].reshape(parts[0].shape[0], *kept)
    import torch  # not above: commands that end at a wrong key need none

    stacked = torch.cat([part.reshape(groups, part.shape[0] // groups, -1) for part in parts], 1)
    return stacked.reshape(groups * stacked.shape[1], *kept)


def unpack(packed: Tensor, lengths: Sequence[int], *, groups: int) -> list[Tensor]:
    """Undo :func:`pack`, but for the folded axes; part lengths are in the ratio of ``lengths``."""
    per_group = packed.shape[0] // groups
    sizes = [per_group * length // sum(lengths) for length in lengths]
    grouped = packed.reshape(groups, per_group, *packed.shape[1:])
    return [
        part.reshape(groups * part.shape[1], *packed.shape[1:]) for part in grouped.split(sizes, 1)
    ]
