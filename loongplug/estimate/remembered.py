"""Operations on tensors of the meta device, whose shapes are worked out once.

On that device an operation gives tensors without values. Torch works out many shapes in Python,
which takes some 200 µs, and the layers of a model repeat the same operations.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")
_SCALARS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
# Of operations whose results do not follow from shapes.
_NOT_BY_SHAPE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_empty_strided = torch.ops.aten.empty_strided.default


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor with a storage of its own."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        made: Tensor = _empty_strided(self.sizes, self.strides, dtype=self.dtype, device=_META)
        return made


class RememberedShapes:
    """Runs operations; where one comes again with the same shapes, only tensors are made."""

    def __init__(self) -> None:
        self._follows: dict[Any, bool] = {}
        self._known: dict[Hashable, _Shape | tuple[_Shape | None, ...] | None] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` gives."""
        if func not in self._follows:
            self._follows[func] = _follows_from_shapes(func)
        described: list[Any] = [func]
        if not self._follows[func] or not _describe((args, kwargs), described):
            return func(*args, **kwargs)
        key = tuple(described)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _shapes(result, args)
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        if isinstance(known, _Shape):
            return known.empty()
        return tuple(None if each is None else each.empty() for each in known)


def _follows_from_shapes(func: Any) -> bool:
    """Whether it changes nothing, and its results are new tensors, of shapes known from others."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    new = all(each.alias_info is None for each in schema.returns)
    return new and not schema.is_mutable and not any(tag in func.tags for tag in _NOT_BY_SHAPE)


def _describe(value: Any, described: list[Any]) -> bool:
    """Append what ``value`` is, as far as shapes go; False where that cannot be said."""
    kind = type(value)
    if isinstance(value, Tensor):
        if not value.is_meta or value.layout != torch.strided:
            return False
        described += (Tensor, value.shape, value.stride(), value.dtype)
    elif kind in (tuple, list, torch.Size):
        described += (kind, len(value))
        for each in value:
            if not _describe(each, described):
                return False
    elif kind is dict:
        described += (kind, *value)
        return _describe([*value.values()], described)
    elif value is None or kind in _SCALARS:
        described += (kind, value)  # with the kind, as 1 == 1.0 == True
    else:
        return False
    return True


def _shapes(result: Any, args: Sequence[Any]) -> _Shape | tuple[_Shape | None, ...] | None:
    """Of new tensors with storages of their own; None where one is another kind of result."""
    many = isinstance(result, tuple)
    shapes: list[_Shape | None] = []
    taken = storages(args)
    for each in result if many else (result,):
        if each is None and many:
            shapes.append(None)
            continue
        if not isinstance(each, Tensor) or not each.is_meta or each.layout != torch.strided:
            return None
        shape = _Shape(tuple(each.shape), each.stride(), each.dtype)
        storage = each.untyped_storage()
        again = shape.empty().untyped_storage()
        if storage._cdata in taken or storage.nbytes() != again.nbytes() or each.storage_offset():
            return None
        taken[storage._cdata] = storage
        shapes.append(shape)
    return tuple(shapes) if many else shapes[0]


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Those of the tensors among an operation's arguments or results, by their addresses."""
    found, waiting = {}, [values]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[storage._cdata] = storage
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
    return found
