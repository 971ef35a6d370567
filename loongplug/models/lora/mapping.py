"""Adapters in the tables of names: ours, and those of ``peft`` on the model of ``transformers``.

``peft`` adapts each of its linears by itself. Where ours is several of them side by side (q, k and
v; gate and up), their adapters have the same ``A``, and ``B`` falls into their rows. Of experts,
whose weights are one tensor there, ``A`` and ``B`` of all of them are stacked.
"""

import re
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_mapping import (
    ADAPTER,
    Bundle,
    Mapping,
    Row,
    Shape,
    Source,
    Split,
    is_adapter,
)
from loongplug.models.lora import LoraSettings

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT = ".weight"
_NUMBER = "{}"


@dataclass(frozen=True)
class AdaptedLinear:
    """A kind of linear with adapters: the modules of ``transformers`` that it stands for.

    ``name`` is the linear's in our model; ``modules`` have ``{}`` for the layer, too; of experts it
    is the parameter that holds their weights.
    """

    name: str
    modules: tuple[str, ...]
    settings: LoraSettings
    experts: int | None


class AdapterTable:
    """Every adapter of a model: parameters, tensors in a file, and what ``peft`` is told of them.

    A tensor in ``mapping`` counts experts on its first axis; :meth:`to_file` makes of it what
    stands in the file, and :meth:`file_names` gives the names that it has there.
    """

    def __init__(self, settings: Dictionary[str, LoraSettings], model: HuggingFaceModel) -> None:
        """``settings`` by the modules' names in our model, such as ``text_decoder``."""
        self.linears: list[AdaptedLinear] = []
        self._copies: dict[int, tuple[str, ...]] = {}
        rows: list[Row] = []
        for known in model.mapping.rows:
            name = known.names[0].removesuffix(_WEIGHT)
            module, _, path = name.partition(".")
            own = settings.get(module)
            if own is None or name == known.names[0] or not own.targets(path):
                continue
            row = replace(known, sources=known.in_model or known.sources)
            modules = tuple(model.module_name(source.name) for source in row.sources)
            self.linears.append(AdaptedLinear(name, modules, own, row.experts))
            self._copies[len(rows)] = tuple(_tensor(each, "A") for each in modules[1:])
            rows += _rows(row, name, modules, own)
        self.rows = tuple(rows)
        self.mapping = Mapping(rows, twins={}, covers=is_adapter)
        self._nested = _nested(self.linears)

    def file_names(self, bundle: Bundle, source: Source) -> tuple[str, ...]:
        """The names under which a tensor of ``bundle`` stands in the file."""
        names = [source.name]
        if source == bundle.sources[0]:
            names += [
                each.replace(_NUMBER, str(bundle.layer))
                for each in self._copies.get(bundle.number, ())
            ]
        return tuple(self._in_peft(each) for each in names)

    def _in_peft(self, name: str) -> str:
        for parameter, module in self._nested.items():
            name = re.sub(parameter, module, name)
        return f"base_model.model.{name}"

    @staticmethod
    def file_shape(source: Source) -> Shape:
        """The shape of a tensor in the file."""
        if not source.experts:
            return source.shape
        experts, rows, columns = source.shape
        is_a = source.name.endswith(_tensor("", "A"))
        return (experts * rows, columns) if is_a else (rows, columns * experts)

    @staticmethod
    def to_file(source: Source, tensor: "Tensor") -> "Tensor":
        """The tensor as it stands in the file, where that of experts is a matrix."""
        if not source.experts:
            return tensor
        if not source.name.endswith(_tensor("", "A")):
            tensor = tensor.permute(1, 2, 0)
        return tensor.reshape(AdapterTable.file_shape(source)).contiguous()

    @staticmethod
    def from_file(source: Source, tensor: "Tensor") -> "Tensor":
        """Undo :meth:`to_file`."""
        if not source.experts:
            return tensor
        experts, rows, columns = source.shape
        if source.name.endswith(_tensor("", "A")):
            return tensor.reshape(source.shape)
        return tensor.reshape(rows, columns, experts).permute(2, 0, 1)


def adapter_table(model: Any, hugging_face: HuggingFaceModel) -> AdapterTable | None:
    """The adapters that the config ``model`` asks for; None where it asks for none."""
    settings = {
        name: architecture.lora
        for name, architecture in model.modules().items()
        if architecture.lora is not None
    }
    return AdapterTable(settings, hugging_face) if settings else None


def with_adapters(mapping: Mapping, table: AdapterTable | None) -> Mapping:
    """All parameters in one mapping, the adapters' behind the others."""
    if table is None:
        return mapping
    return Mapping([*mapping.rows, *table.rows], twins=mapping.twins, covers=lambda name: True)


def _tensor(module: str, matrix: str) -> str:
    return f"{module}.lora_{matrix}.weight"


def _rows(row: Row, name: str, modules: tuple[str, ...], settings: LoraSettings) -> list[Row]:
    """Rows of A and of B beside the linear ``name`` of ``row``."""
    many = () if row.experts is None else (row.experts,)
    first = row.sources[0]
    a = Source(
        _tensor(modules[0], "A"),
        (*many, settings.rank, first.matrix[1]),
        experts=first.experts,
    )
    b = tuple(
        Source(
            _tensor(module, "B"),
            (*many, source.matrix[0], settings.rank),
            parts=source.parts,
            experts=source.experts,
        )
        for module, source in zip(modules, row.sources, strict=True)
    )
    of_a = Split.ROW if row.split is Split.ROW else Split.NONE
    of_b = Split.COLUMN if row.split is Split.COLUMN else Split.NONE
    prefix = f"{name}{ADAPTER}"
    return [
        Row((f"{prefix}.a",), (a,), of_a, count=row.count, experts=row.experts),
        Row((f"{prefix}.b",), b, of_b, row.groups, count=row.count, experts=row.experts),
    ]


def _nested(linears: list[AdaptedLinear]) -> dict[str, str]:
    """Where ``peft`` keeps the adapters of parameters, by patterns of the parameters' names.

    It wraps the module that has the parameters, once for each of them: the first is innermost.
    """
    owners: dict[str, list[str]] = {}
    for linear in linears:
        if linear.experts is not None:
            owner, _, parameter = linear.modules[0].rpartition(".")
            owners.setdefault(owner, []).append(parameter)
    found: dict[str, str] = {}
    for owner, parameters in owners.items():
        pattern = re.escape(owner).replace(re.escape(_NUMBER), r"(\d+)")
        for depth, parameter in enumerate(reversed(parameters)):
            inner = owner.replace(_NUMBER, r"\1") + ".base_layer" * depth
            found[rf"^{pattern}\.{parameter}(?=\.lora_)"] = inner
    return found
