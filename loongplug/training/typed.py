"""Fill frozen config dataclasses from plain YAML data, and turn them back into it."""

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

TARGET = "_target_"
_PLAIN_DATA = "plain YAML data: scalars, lists, and mappings by text"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that most resembles ``name``, or None when nothing does."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def the_closest_is(name: str, known: Iterable[str]) -> str:
    """``"; the closest is X"``, or nothing when no known name resembles ``name``."""
    match = closest(name, known)
    return f"; the closest is {match}" if match is not None else ""


class Filler:
    """Fills dataclasses and notes every problem instead of stopping at the first.

    ``resolve`` turns a ``_target_`` into its class and raises ValueError for one that is not
    allowed; ``origin`` says in which file (or override) a dotted key was set.
    """

    def __init__(self, *, resolve: Callable[[str], type], origin: Callable[[str], str]) -> None:
        self.problems: list[str] = []
        self._resolve = resolve
        self._origin = origin

    def fill(self, annotation: Any, value: object, *, key: str) -> Any:
        """``value`` as ``annotation`` asks for it; what comes back counts only without problems."""
        if dataclasses.is_dataclass(annotation):
            return self._fill_dataclass(annotation, value, key=key)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            if value is None:
                return None
            inner = _without_none(annotation)
            if isinstance(inner, type) and not dataclasses.is_dataclass(inner):
                return self._fill_scalar(inner, value, key=key, expected=annotation)
            return self.fill(inner, value, key=key)
        if typing.get_origin(annotation) is tuple:
            return self._fill_tuple(annotation, value, key=key)
        if typing.get_origin(annotation) is Mapping:
            if isinstance(value, Mapping):  # the config itself knows its keys and values
                return self._plain_data(value, key=key)
            self._wrong_type(annotation, value, key=key)
            return None
        return self._fill_scalar(annotation, value, key=key, expected=annotation)

    def _fill_scalar(self, wanted: type, value: object, *, key: str, expected: Any) -> Any:
        if type(value) is wanted:  # a bool is not an int here
            if isinstance(value, float) and not math.isfinite(value):
                self._note(key, f"is {value}, but a finite number is expected")
            return value
        if wanted is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        self._wrong_type(expected, value, key=key)
        return None

    def _fill_dataclass(self, annotation: Any, value: object, *, key: str) -> Any:
        if not isinstance(value, Mapping):
            self._wrong_type(annotation, value, key=key)
            return None
        config_class = self._target(annotation, value, key=key)
        if config_class is None:
            return None
        before = len(self.problems)
        hints = typing.get_type_hints(config_class)
        fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
        for name in value:
            if name != TARGET and name not in fields:
                self._note(
                    f"{key}.{name}",
                    f"is not a key of {config_class.__name__}{the_closest_is(str(name), fields)}",
                )
        for name, field in fields.items():
            if name not in value and _is_required(field):
                self._note(f"{key}.{name}", f"is missing; expected {describe(hints[name])}", at=key)
        filled = {
            name: self.fill(hints[name], value[name], key=f"{key}.{name}")
            for name in fields
            if name in value
        }
        if len(self.problems) > before:
            return None
        try:
            return config_class(**filled)
        except ValueError as error:  # of a config that looks at its values itself
            self._note(key, f"is refused: {error}")
            return None

    def _target(self, annotation: Any, value: Mapping[Any, object], *, key: str) -> Any:
        """The class to fill: the mapping's ``_target_``, or the annotation where it has none."""
        if TARGET not in value:
            return annotation
        target = value[TARGET]
        try:
            if not isinstance(target, str):
                raise ValueError(f"_target_ is a dotted class name, not {target!r}")
            config_class = self._resolve(target)
        except ValueError as error:
            self._note(f"{key}.{TARGET}", f"is refused: {error}")
            return None
        if not issubclass(config_class, annotation):
            self._note(
                f"{key}.{TARGET}",
                f"is {target}, but a {annotation.__module__}.{annotation.__qualname__} is expected",
            )
            return None
        return config_class

    def _fill_tuple(self, annotation: Any, value: object, *, key: str) -> Any:
        arms = typing.get_args(annotation)
        if not isinstance(value, list | tuple):
            self._wrong_type(annotation, value, key=key)
            return None
        if arms[-1] is Ellipsis:
            arms = (arms[0],) * len(value)
        if len(arms) != len(value):
            self._note(key, f"has {len(value)} values, but {describe(annotation)} is expected")
            return None
        return tuple(
            self.fill(arm, item, key=f"{key}[{index}]")
            for index, (arm, item) in enumerate(zip(arms, value, strict=True))
        )

    def _plain_data(self, value: object, *, key: str) -> Any:
        """A copy of scalars, lists and mappings; all else is noted."""
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str):
                    self._note(key, f"has the key {name!r}, but {_PLAIN_DATA} is expected")
            return {
                name: self._plain_data(each, key=f"{key}.{name}") for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._plain_data(e, key=f"{key}[{index}]") for index, e in enumerate(value)]
        if value is None or type(value) in (bool, str, int):
            return value
        if type(value) is float:
            return self._fill_scalar(float, value, key=key, expected=float)
        self._note(key, f"is {value!r}, {_kind(value)}, but {_PLAIN_DATA} is expected")
        return None

    def _wrong_type(self, annotation: Any, value: object, *, key: str) -> None:
        given = "null" if value is None else f"{value!r}, {_kind(value)}"
        self._note(key, f"is {given}, but {describe(annotation)} is expected")

    def _note(self, key: str, problem: str, *, at: str | None = None) -> None:
        self.problems.append(f"{self._origin(at or key)}: {key} {problem}")


def describe(annotation: Any) -> str:
    """An annotation in words: ``an int``, ``a list of 3 ints``."""
    if dataclasses.is_dataclass(annotation):
        return f"a mapping for {getattr(annotation, '__name__', annotation)}"
    arms = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return f"{describe(_without_none(annotation))} or null"
    if typing.get_origin(annotation) is tuple:
        count = "" if arms[-1] is Ellipsis else f"{len(arms)} "
        return f"a list of {count}{arms[0].__name__}s"
    if typing.get_origin(annotation) is Mapping:
        return "a mapping"
    article = "an" if annotation is int else "a"
    return f"{article} {annotation.__name__}"


def plain(value: Any) -> Any:
    """A config as the YAML data that gives it back: mappings with ``_target_``, lists, scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        target = f"{type(value).__module__}.{type(value).__qualname__}"
        return {TARGET: target} | {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value


def _without_none(annotation: Any) -> Any:
    """X of ``X | None``, the only kind of union that configs have."""
    (inner,) = (arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
    return inner


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", int: "an int"}
    return names.get(type(value), f"a {type(value).__name__}")
