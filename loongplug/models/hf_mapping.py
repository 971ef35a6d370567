"""One table row per kind of parameter: its Hugging Face tensors, their layout, their TP split.

A parameter is built from *parts*: equally split tensors of the Hugging Face side (q, k and v; gate
and up; or just the tensor itself). Splitting works on the parts and packing on what is left of
them, so the same two steps serve a single rank and any tensor-parallel size, weights and
gradients, and both directions. Everything here is pure and linear.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Split(Enum):
    """How tensor parallelism splits a parameter."""

    NONE = "none"  # the same on every rank
    COLUMN = "column"  # every part along its first axis: outputs, or the vocabulary
    ROW = "row"  # along the second axis: inputs


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name (``{}`` for the layer), shape, how many parts along axis 0."""

    name: str
    shape: Shape
    parts: int = 1


@dataclass(frozen=True)
class Row:
    """How one kind of parameter corresponds to Hugging Face tensors.

    ``names`` are our names for it (``{}`` for the layer). There are several where layer specs
    differ in which module keeps it, and where stages keep copies of it (tied embeddings).
    ``groups`` is how often the parts alternate in our tensor: 1 stacks them, the number of query
    groups gives Megatron's order of q, k and v. ``count`` is the number of layers, None where
    there is nothing to count.
    """

    names: tuple[str, ...]
    sources: tuple[Source, ...]
    split: Split = Split.NONE
    groups: int = 1
    count: int | None = None


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model: a row at one (global) layer."""

    row: Row
    layer: int | None

    @property
    def name(self) -> str:
        """Our (first) name for it, with the global layer."""
        return _fill(self.row.names[0], self.layer)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The Hugging Face tensors it corresponds to."""
        return tuple(Source(_fill(s.name, self.layer), s.shape, s.parts) for s in self.row.sources)


class Mapping:
    """All rows of a model; finds a parameter's row and walks all parameters in a fixed order.

    ``twins`` are tensors that a Hugging Face file may have besides, each with the name of the
    tensor that it must equal.
    """

    def __init__(self, rows: Sequence[Row], *, twins: dict[str, str]) -> None:
        self._rows = tuple(rows)
        self.twins = twins
        self._by_name = {name: row for row in self._rows for name in row.names}
        assert len(self._by_name) == sum(len(row.names) for row in self._rows), "a name twice"

    def entries(self) -> Iterator[Entry]:
        """Every parameter of the model once, in an order that is the same on every rank."""
        for row in self._rows:
            for layer in [None] if row.count is None else range(row.count):
                yield Entry(row, layer)

    def find(self, name: str) -> Entry | None:
        """The entry of a parameter by our name with its global layer; None if there is none."""
        if name in self._by_name:
            return Entry(self._by_name[name], None)
        for match in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            row = self._by_name.get(f"{name[: match.start()]}{{}}{name[match.end() :]}")
            layer = int(match.group())
            if row is not None and row.count is not None and layer < row.count:
                return Entry(row, layer)
        return None

    def sources(self) -> dict[str, Shape]:
        """Name and shape of every Hugging Face tensor of the model."""
        return {s.name: s.shape for entry in self.entries() for s in entry.sources}


def _fill(pattern: str, layer: int | None) -> str:
    return pattern if layer is None else pattern.replace("{}", str(layer))


def shift_layers(name: str, offsets: dict[str, int]) -> str:
    """``name`` with the layer index after each prefix of ``offsets`` moved by that offset.

    >>> shift_layers("decoder.layers.1.weight", {"decoder.layers": 4})
    'decoder.layers.5.weight'
    """
    for prefix, offset in offsets.items():
        match = re.match(rf"{re.escape(prefix)}\.(\d+)(?=\.)", name)
        if match:
            return f"{prefix}.{int(match.group(1)) + offset}{name[match.end() :]}"
    return name


def full_shape(row: Row) -> Shape:
    """The shape of our whole parameter: parts stacked, axes behind the second folded into it."""
    rows = sum(source.shape[0] for source in row.sources)
    rest = row.sources[0].shape[1:]
    return (rows, prod(rest)) if rest else (rows,)


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
    """Start and stop of a part in its source, axis by axis."""
    length = source.shape[0] // source.parts
    return [(part * length, (part + 1) * length), *((0, size) for size in source.shape[1:])]


def read_local(
    row: Row, read: Callable[[int, tuple[slice, ...]], Tensor], *, rank: int, tp: int
) -> Tensor:
    """The local parameter of tensor parallel rank ``rank``, reading no more than that needs.

    Args:
        read: gives ``source[slices]`` of the row's n-th source.
    """
    parts: list[Tensor] = []
    for index, source in enumerate(row.sources):
        for part in range(source.parts):
            bounds = _part_bounds(source, part)
            if row.split is not Split.NONE:
                axis = _split_axis(row)
                start, stop = bounds[axis]
                piece = (stop - start) // tp
                bounds[axis] = (start + rank * piece, start + (rank + 1) * piece)
            parts.append(read(index, tuple(slice(*bound) for bound in bounds)))
    return pack(parts, groups=_local_groups(row, tp))


def merge_shards(row: Row, shards: Sequence[Tensor]) -> list[Tensor]:
    """The whole Hugging Face tensors, one per source, from the local parameters of all TP ranks.

    A parameter that is not split is taken from the first of ``shards``.
    """
    if row.split is Split.NONE:
        shards = shards[:1]
    lengths = [s.shape[0] // s.parts for s in row.sources for _ in range(s.parts)]
    groups = _local_groups(row, len(shards))
    pieces = [unpack(shard, lengths, groups=groups) for shard in shards]
    parts = [torch.cat(piece, dim=_split_axis(row)) for piece in zip(*pieces, strict=True)]
    tensors: list[Tensor] = []
    for source in row.sources:
        mine, parts = parts[: source.parts], parts[source.parts :]
        tensors.append(torch.cat(mine).reshape(source.shape))
    return tensors


def _local_groups(row: Row, tp: int) -> int:
    return row.groups // tp if row.split is Split.COLUMN and row.groups > 1 else row.groups


def pack(parts: Sequence[Tensor], *, groups: int) -> Tensor:
    """Interleave parts: per group, that group's rows of every part; trailing axes folded to one.

    Args:
        parts: each [groups * n, ...] with its own n.

    Returns:
        [groups * sum of n, rest], or one axis when the parts have one.
    """
    stacked = torch.cat([part.reshape(groups, part.shape[0] // groups, -1) for part in parts], 1)
    rows = groups * stacked.shape[1]
    return stacked.reshape(rows) if parts[0].dim() == 1 else stacked.reshape(rows, -1)


def unpack(packed: Tensor, lengths: Sequence[int], *, groups: int) -> list[Tensor]:
    """Undo :func:`pack`, but for the folded axes; part lengths are in the ratio of ``lengths``."""
    per_group = packed.shape[0] // groups
    sizes = [per_group * length // sum(lengths) for length in lengths]
    grouped = packed.reshape(groups, per_group, *packed.shape[1:])
    return [
        part.reshape(groups * part.shape[1], *packed.shape[1:]) for part in grouped.split(sizes, 1)
    ]
