"""Frozen config dataclasses from plain YAML data, and the data that give a config again."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

TARGET = "_target_"
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # only whole numbers become floats


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
        arms: tuple[Any, ...] = (annotation,)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            arms = typing.get_args(annotation) if value is not None else ()
        for arm in arms:
            origin = typing.get_origin(arm)
            if dataclasses.is_dataclass(arm):
                return self._fill_dataclass(arm, value, key=key)
            if origin is tuple and isinstance(value, list | tuple):
                return self._fill_tuple(arm, value, key=key)
            if origin is Mapping and isinstance(value, Mapping):
                return self._fill_plain_data(value, key=key)
        return self._fill_scalar(annotation, value, key=key)

    def _fill_scalar(self, annotation: Any, value: object, *, key: str) -> Any:
        try:
            return TypeAdapter(annotation, config=_STRICT).validate_python(value)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]["msg"].removeprefix("Input ")
            wrong = wrong.replace("input was not", "should be").replace("tuple", "list")
            self._note(key, f"is {_said(value)}, but {wrong}")
            return None

    def _fill_tuple(self, annotation: Any, value: Sequence[object], *, key: str) -> Any:
        items = typing.get_args(annotation)
        if items[-1] is Ellipsis:
            items = (items[0],) * len(value)
        if len(items) != len(value):
            self._note(key, f"has {len(value)} values, but should have {len(items)}")
            return None
        return tuple(
            self.fill(item, each, key=f"{key}[{index}]")
            for index, (item, each) in enumerate(zip(items, value, strict=True))
        )

    def _fill_plain_data(self, value: object, *, key: str) -> Any:
        """A copy of mappings, lists and scalars, whose config itself knows their keys."""
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str):
                    self._note(key, f"has the key {name!r}, but keys should be text")
            return {
                name: self._fill_plain_data(each, key=f"{key}.{name}")
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self._fill_plain_data(each, key=f"{key}[{index}]")
                for index, each in enumerate(value)
            ]
        return self._fill_scalar(JsonValue, value, key=key)

    def _fill_dataclass(self, annotation: Any, value: object, *, key: str) -> Any:
        if not isinstance(value, Mapping):
            wanted = f"a mapping for {annotation.__name__}"
            self._note(key, f"is {_said(value)}, but should be {wanted}")
            return None
        config_class = self._target(annotation, value, key=key)
        if config_class is None:
            return None
        before = len(self.problems)
        hints = typing.get_type_hints(config_class)
        fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
        for name in value:
            if name != TARGET and name not in fields:
                close = the_closest_is(str(name), fields)
                self._note(f"{key}.{name}", f"is not a key of {config_class.__name__}{close}")
        for name, field in fields.items():
            missing = dataclasses.MISSING
            if name not in value and field.default is field.default_factory is missing:
                self._note(f"{key}.{name}", "is missing", at=key)
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
            wanted = f"{annotation.__module__}.{annotation.__qualname__}"
            self._note(f"{key}.{TARGET}", f"is {target}, but should be a {wanted}")
            return None
        return config_class

    def _note(self, key: str, problem: str, *, at: str | None = None) -> None:
        self.problems.append(f"{self._origin(at or key)}: {key} {problem}")


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


def _said(value: object) -> str:
    return "null" if value is None else repr(value)
