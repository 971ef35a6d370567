"""Tables of names replaced at run time: applied as a whole, undone as a whole.

A row names its target by its dotted path and says why it is replaced. Copies of the target
that importing modules made by value (``from torch.cuda import _lazy_call``) follow, whether
they were made before or while the table was active; what was bound in another way (a default
argument, an element of a tuple) keeps what it got.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_MISSING: Any = object()


class ReplacementError(RuntimeError):
    """A target is not what its row was written for; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One row: ``target`` gives way to ``replacement``, or to ``wrapper(original)``.

    ``parameters`` are the names of the original's, as they were when the row was written, in
    the order and with the marks of :func:`parameter_names`; None where there are none to ask for
    (C functions) or where they do not matter (classes whose whole use is replaced).
    """

    target: str
    reason: str
    replacement: Any = None
    wrapper: Callable[[Any], Any] | None = None
    parameters: str | None = None

    def build(self, original: Any) -> Any:
        """The object that takes the target's place."""
        return self.replacement if self.wrapper is None else self.wrapper(original)


@dataclass(frozen=True, kw_only=True)
class _Applied:
    """What one row did, so that it can be undone."""

    owner: Any
    name: str
    own: Any  # the owner's own attribute, or _MISSING where it was inherited
    original: Any
    new: Any


class ReplacementTable:
    """Rows that are applied together or not at all.

    ``importers`` are the packages whose modules' by-value copies follow.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Replacement],
        *,
        importers: Sequence[str] = ("megatron",),
    ) -> None:
        self.name = name
        self.rows = tuple(rows)
        self._importers = tuple(importers)
        self._applied: list[_Applied] = []

    @property
    def active(self) -> bool:
        """Whether the table is applied now."""
        return bool(self._applied)

    def apply(self) -> None:
        """Put every replacement in place; does nothing when the table is applied already.

        Raises ReplacementError, with nothing changed, when a target is missing or has
        other parameters than its row expects.
        """
        if self._applied:
            return
        found = [(row, *resolve(row)) for row in self.rows]
        for row, owner, name, original in found:
            self._applied.append(
                _Applied(
                    owner=owner,
                    name=name,
                    own=vars(owner).get(name, _MISSING),
                    original=original,
                    new=row.build(original),
                )
            )
        for change in self._applied:
            setattr(change.owner, change.name, change.new)
        self._rebind([(change.original, change.new) for change in self._applied])

    def undo(self) -> None:
        """Put every original back; does nothing when the table is not applied."""
        for change in reversed(self._applied):
            if change.own is _MISSING:
                delattr(change.owner, change.name)
            else:
                setattr(change.owner, change.name, change.own)
        self._rebind([(change.new, change.original) for change in self._applied])
        self._applied.clear()

    def _rebind(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Exchange by-value copies of functions and classes.

        Other objects may be shared with names that mean something else: ``()`` is one object.
        Ids are safe because the table holds both ends of every pair.
        """
        exchange = {id(old): new for old, new in pairs if callable(old)}
        for module in self._importing_modules():
            # Few modules have any: what finds these runs without a step of Python for each name.
            if exchange.keys().isdisjoint(map(id, vars(module).values())):
                continue
            for key, value in list(vars(module).items()):
                if id(value) in exchange:
                    setattr(module, key, exchange[id(value)])

    def _importing_modules(self) -> Iterator[ModuleType]:
        inside = tuple(f"{name}." for name in self._importers)
        for name, module in list(sys.modules.items()):
            ours = name.startswith(inside) or name in self._importers
            if ours and isinstance(module, ModuleType):
                yield module


def resolve(row: Replacement) -> tuple[Any, str, Any]:
    """The target's owner (a module or a class), its name there, and the object it is now.

    Raises ReplacementError when it is missing or its parameters are not the row's.
    """
    owner, path = _import_longest(row.target)
    for index, name in enumerate(path):
        value = getattr(owner, name, _MISSING)
        if value is _MISSING:
            where = ".".join(row.target.split(".")[: -len(path) + index])
            raise ReplacementError(
                f"{row.target}: expected to replace it ({row.reason}), "
                f"found no {name!r} in {where}; {_advice(row.target)}"
            )
        if index < len(path) - 1:
            owner = value
    if row.parameters is not None:
        _check_parameters(row, value)
    return owner, path[-1], value


def _import_longest(target: str) -> tuple[Any, list[str]]:
    """The longest importable module of a dotted path, and the attribute names behind it."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
    raise ReplacementError(
        f"{target}: expected to replace it, found no module {parts[0]!r}; {_advice(target)}"
    )


def _check_parameters(row: Replacement, value: Any) -> None:
    try:
        found = parameter_names(value)
    except (TypeError, ValueError):
        found = f"no parameters ({type(value).__name__})"
    if found != row.parameters:
        raise ReplacementError(
            f"{row.target}: expected the parameters {row.parameters}, found {found}; "
            f"{_advice(row.target)}"
        )


def parameter_names(function: Callable[..., Any]) -> str:
    """Names and kinds of a function's parameters: ``(self, batch, *, strict, **options)``.

    Raises TypeError or ValueError where there are none to ask for.
    """
    signature, empty = inspect.signature(function), inspect.Parameter.empty
    plain = [
        each.replace(annotation=empty, default=empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


def _advice(target: str) -> str:
    package = target.split(".", 1)[0].replace("megatron", "megatron-core")
    return (
        f"the installed {package} is not a version that LoongPlug knows: install one that "
        "pyproject.toml allows, or adapt the row in loongplug/platform"
    )
