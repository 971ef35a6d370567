"""Tables of names replaced at run time: applied as a whole, undone as a whole.

A row names its target by its dotted path and says why it is replaced. Copies of the target
that importing modules made by value (``from torch.cuda import _lazy_call``) follow, whether
they were made before or while the table was active; what was bound in another way (a default
argument, an element of a tuple) keeps what it got.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
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
        # By row: its owner, its name there, the owner's own attribute, the original, the new one.
        self._applied: list[tuple[Any, str, Any, Any, Any]] = []

    def apply(self) -> None:
        """Put every replacement in place; does nothing when the table is applied already.

        Raises ReplacementError, with nothing changed, when a target is missing or has
        other parameters than its row expects.
        """
        if self._applied:
            return
        found = [(row, *resolve(row)) for row in self.rows]
        for row, owner, name, original in found:
            own = vars(owner).get(name, _MISSING)  # missing where it is inherited
            self._applied.append((owner, name, own, original, row.build(original)))
        for owner, name, _, _, new in self._applied:
            setattr(owner, name, new)
        self._rebind([(original, new) for *_, original, new in self._applied])

    def undo(self) -> None:
        """Put every original back; does nothing when the table is not applied."""
        for owner, name, own, _, _ in reversed(self._applied):
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._rebind([(new, original) for *_, original, new in self._applied])
        self._applied.clear()

    def _rebind(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Exchange by-value copies of functions and classes.

        Other objects may be shared with names that mean something else: ``()`` is one object.
        Ids are safe because the table holds both ends of every pair.
        """
        exchange = {id(old): new for old, new in pairs if callable(old)}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in self._importers or not isinstance(module, ModuleType):
                continue
            # Few modules have any: what finds these runs without a step of Python for each name.
            if exchange.keys().isdisjoint(map(id, vars(module).values())):
                continue
            for key, value in list(vars(module).items()):
                if id(value) in exchange:
                    setattr(module, key, exchange[id(value)])


def as_wrapper(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A row's ``wrapper``, by which ``function(original, ...)`` stands for ``original(...)``."""

    @functools.wraps(function)
    def wrapper(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrapper


def resolve(row: Replacement) -> tuple[Any, str, Any]:
    """The target's owner (a module or a class), its name there, and the object it is now.

    Raises ReplacementError when it is missing or its parameters are not the row's.
    """
    path, _, name = row.target.rpartition(".")
    try:
        owner = _found(path)
        value = getattr(owner, name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not _is_within(path, error.name):
            raise
        raise _error(row, f"to replace it ({row.reason}), but {error}") from error
    if row.parameters is not None:
        try:
            found = parameter_names(value)
        except (TypeError, ValueError):
            found = f"no parameters ({type(value).__name__})"
        if found != row.parameters:
            raise _error(row, f"the parameters {row.parameters}, found {found}")
    return owner, name, value


def _found(path: str) -> Any:
    """The module, or what is within one, at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        outer, _, name = path.rpartition(".")
        if not outer or not _is_within(path, error.name):
            raise
    return getattr(_found(outer), name)


def _is_within(path: str, name: str | None) -> bool:
    """Whether a module that is missing is the path's, and none that the path's imports."""
    return name is not None and f"{path}.".startswith(f"{name}.")


def parameter_names(function: Callable[..., Any]) -> str:
    """Names and kinds of a function's parameters: ``(self, batch, *, strict, **options)``.

    Raises TypeError or ValueError where there are none to ask for.
    """
    signature, empty = inspect.signature(function), inspect.Parameter.empty
    plain = [
        each.replace(annotation=empty, default=empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


def _error(row: Replacement, expected: str) -> ReplacementError:
    package = row.target.partition(".")[0].replace("megatron", "megatron-core")
    return ReplacementError(
        f"{row.target}: expected {expected}; the installed {package} is not a version that "
        "LoongPlug knows: install one that pyproject.toml allows, or adapt the row in "
        "loongplug/platform"
    )
