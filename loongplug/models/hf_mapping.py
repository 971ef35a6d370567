"""One table row per kind of parameter: its Hugging Face tensors, their layout, their TP split.

A parameter is built from *parts*: equally split tensors of the Hugging Face side (q, k and v; gate
and up; or just the tensor itself). Experts are one more index: a parameter holds one expert, its
Hugging Face tensor all of them. What a rank holds is in :mod:`loongplug.models.hf_slices`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Where = tuple[slice, ...]


_EXPERT = "{expert}"  # of the name of what each expert has
HEAD = "lm_head.weight"  # of the output layer, in the files of most models
ADAPTER = "_lora"  # of the name of a module beside a linear, behind the linear's


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.rpartition(".")[0].endswith(ADAPTER)


CARRIED = "carried"  # the name of a module within an encoder


def is_carried(name: str) -> bool:
    """Whether a parameter of this name never trains: most only travel from file to file.

    Nothing runs those; others are tables of positions that their kind keeps as they are.
    """
    return f".{CARRIED}." in name


def parameter_name(tensor: str) -> str:
    """Our name for a tensor of the files that is carried: torch's names have no dots."""
    return tensor.replace(".", "_")


def leading_axes(shape: Shape) -> int:
    """How many axes of length one stand in front, which our parameter does without."""
    return next(number for number, size in enumerate(shape) if size > 1)


class Split(Enum):
    """How tensor parallelism splits a parameter."""

    NONE = "none"  # the same on every rank
    COLUMN = "column"  # every part along its first axis: outputs, or the vocabulary
    ROW = "row"  # along the second axis: inputs


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: its name and shape, and how a parameter reads it.

    The name has ``{}`` for the layer, and ``{expert}`` where each expert has a tensor of its own.
    ``experts``: the first axis counts experts, and a parameter is one of them. ``transposed``:
    the last two axes are (inputs, outputs). ``leading``: so many axes of length one stand in front
    of what the parameter has. What is left after all is the *matrix*, (outputs, inputs, ...), which
    falls into ``parts`` along its first axis. ``absent``: no file has the tensor, and the parameter
    has zeros in its place.
    """

    name: str
    shape: Shape
    parts: int = 1
    experts: bool = False
    transposed: bool = False
    leading: int = 0
    absent: bool = False

    @property
    def matrix(self) -> Shape:
        """The shape of what one parameter is made of."""
        shape = self.shape[self.leading + self.experts :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def in_file(self, where: Where, *, expert: int | None) -> Where:
        """The place in the tensor of a slice of the matrix."""
        if self.transposed:
            where = (*where[:-2], where[-1], where[-2])
        if self.experts:
            assert expert is not None
            where = (slice(expert, expert + 1), *where)
        return (*(slice(0, 1) for _ in range(self.leading)), *where)

    def to_matrix(self, tensor: Tensor) -> Tensor:
        """A tensor that was read, as a slice of the matrix."""
        for _ in range(self.leading + self.experts):
            tensor = tensor[0]
        return _turned(tensor) if self.transposed else tensor

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo :meth:`to_matrix`."""
        if self.transposed:
            matrix = _turned(matrix)
        for _ in range(self.leading + self.experts):
            matrix = matrix[None]
        return matrix


def _turned(matrix: Tensor) -> Tensor:
    """The transpose as a tensor of its own: torch turns whole matrices ten times as fast as it
    copies a turned one into a slice.
    """
    return matrix.transpose(-1, -2).contiguous()


@dataclass(frozen=True)
class Row:
    """How one kind of parameter corresponds to Hugging Face tensors.

    ``names`` are our names for it (``{}`` for the layer, ``{expert}`` for the expert). There are
    several where layer specs differ in which module keeps it, and where stages keep copies of it
    (tied embeddings). ``groups`` is how often the parts alternate in our tensor: 1 stacks them,
    the number of query groups gives Megatron's order of q, k and v. ``count`` is the number of
    layers, ``experts`` that of experts; None where there is nothing to count. ``in_model`` are the
    tensors that transformers' model makes of the sources, where files have them otherwise: adapters
    are for those. ``folded``: our parameter has one axis for all behind the first of its sources;
    otherwise it has theirs.
    """

    names: tuple[str, ...]
    sources: tuple[Source, ...]
    split: Split = Split.NONE
    groups: int = 1
    count: int | None = None
    experts: int | None = None
    in_model: tuple[Source, ...] = ()
    folded: bool = True

    @property
    def experts_apart(self) -> bool:
        """Whether each expert has tensors of its own."""
        return any(_EXPERT in source.name for source in self.sources)


@dataclass(frozen=True)
class Bundle:
    """The Hugging Face tensors of one row at one (global) layer, which are made together.

    Where experts have tensors of their own, they are those of one (global) ``expert``.
    """

    row: Row
    number: int  # the row's place in the table
    layer: int | None
    expert: int | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The tensors that files have, with layer and expert in their names."""
        return tuple(
            replace(source, name=_fill(source.name, self.layer, self.expert))
            for source in self.row.sources
            if not source.absent
        )

    def entries(self) -> Iterator[MappedParameter]:
        """The parameters they correspond to: one, or one for each expert."""
        together = self.row.experts is not None and self.expert is None
        for expert in range(self.row.experts or 0) if together else [self.expert]:
            yield MappedParameter(self.row, self.number, self.layer, expert)


@dataclass(frozen=True)
class MappedParameter(Bundle):
    """One parameter of the whole model: a row at one (global) layer, for one (global) expert."""

    @property
    def name(self) -> str:
        """Our (first) name for it, with the global layer and expert."""
        return _fill(self.row.names[0], self.layer, self.expert)


class Mapping:
    """All rows of a model; finds a parameter's row and walks all parameters in a fixed order.

    ``twins`` are tensors that a Hugging Face file may have besides, each with the name of the
    tensor that it must equal. ``covers`` says of a parameter's name whether it concerns the
    mapping at all: adapters are no part of a model's folder.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        twins: dict[str, str],
        covers: Callable[[str], bool] = lambda name: not is_adapter(name),
    ) -> None:
        self.rows = tuple(rows)
        self.twins = twins
        self.covers = covers

    def bundles(self) -> Iterator[Bundle]:
        """Every Hugging Face tensor once, in an order that is the same on every rank."""
        for number, row in enumerate(self.rows):
            apart = range(row.experts or 0) if row.experts_apart else [None]
            for layer in [None] if row.count is None else range(row.count):
                for expert in apart:
                    yield Bundle(row, number, layer, expert)

    def entries(self) -> Iterator[MappedParameter]:
        """Every parameter of the model once, in an order that is the same on every rank."""
        for bundle in self.bundles():
            yield from bundle.entries()

    def find(self, name: str) -> MappedParameter | None:
        """The entry of a parameter by our name with its global layer; None if there is none."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, MappedParameter]:
        return {
            _fill(name, each.layer, each.expert): each
            for each in self.entries()
            for name in each.row.names
        }

    def sources(self) -> dict[str, Shape]:
        """Name and shape of every Hugging Face tensor of the model."""
        return {s.name: s.shape for bundle in self.bundles() for s in bundle.sources}

    def transposed_sources(self) -> dict[str, Shape]:
        """Name and shape of every transposed tensor of :meth:`sources`."""
        return {s.name: s.shape for b in self.bundles() for s in b.sources if s.transposed}


def _fill(pattern: str, layer: int | None, expert: int | None) -> str:
    name = pattern if layer is None else pattern.replace("{}", str(layer))
    return name if expert is None else name.replace(_EXPERT, str(expert))


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
