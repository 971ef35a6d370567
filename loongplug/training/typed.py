"""Frozen config dataclasses from plain YAML data, and the data that give a config again."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
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
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        arms = typing.get_args(annotation) if is_union else ()
        classes = filter(dataclasses.is_dataclass, (annotation, *arms))
        config_class: Any = next(classes, None)
        if config_class is None or (value is None and arms):
            return self._fill_plain(annotation, value, key=key)
        if isinstance(value, Mapping):
            return self._fill_dataclass(config_class, value, key=key)
        self._note(key, f"is {_said(value)}, but should be a mapping for {config_class.__name__}")
        return None

    def _fill_plain(self, annotation: Any, value: object, *, key: str) -> Any:
        """Scalars, lists as tuples, and mappings, whose config itself knows keys and values."""
        if typing.get_origin(annotation) is Mapping:
            annotation = dict[str, JsonValue]
        given = tuple(value) if isinstance(value, list) else value
        try:
            return TypeAdapter(annotation, config=_STRICT).validate_python(given)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                place = "".join(f"[{part}]" for part in each["loc"])
                wrong = each["msg"].removeprefix("Input ").replace("tuple", "list")
                said = f"is {_said(each['input'])}, but {wrong}"
                missing = each["type"] == "missing"
                self._note(f"{key}{place}", "is missing" if missing else said)
            return None

    def _fill_dataclass(self, annotation: Any, value: Mapping[Any, object], *, key: str) -> Any:
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
            if name not in value and _is_required(field):
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


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _said(value: object) -> str:
    return "null" if value is None else repr(value)
