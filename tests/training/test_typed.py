"""Config values that no packaged model has: lists of lists, lists of configs, plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from loongplug.training.typed import Filler, plain

pytestmark = pytest.mark.quick


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of several."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A config with values in values."""

    grids: tuple[tuple[int, ...], ...] = ()
    parts: tuple[Part, ...] | None = None
    settings: Mapping[str, Any] | None = None


def filled(data: object) -> tuple[Any, list[str]]:
    """The config, and what is wrong with the data."""
    classes = {f"{each.__module__}.{each.__name__}": each for each in (Part, Whole)}
    filler = Filler(resolve=classes.__getitem__, origin=lambda key: "file")
    return filler.fill(Whole, data, key="model"), filler.problems


def test_lists_within_lists_become_tuples_and_lists_again() -> None:
    settings = {"a": [1, {"b": None}], "c": 0.5}
    data = {"grids": [[1, 2], [], [3]], "parts": [{"size": 4}], "settings": settings}
    expected = Whole(grids=((1, 2), (), (3,)), parts=(Part(size=4),), settings=settings)
    assert filled(data) == (expected, [])
    assert filled(plain(expected)) == (expected, [])
    assert plain(expected)["grids"] == data["grids"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"grids": [[1], [2, "x"]]}, "grids[1][1] is 'x', but should be a valid integer"),
        ({"grids": [1]}, "grids[0] is 1, but should be a valid list"),
        ({"parts": [{"size": 1}, {"size": 2.0}]}, "parts[1].size is 2.0, but should be a valid"),
        ({"parts": [3]}, "parts[0] is 3, but should be a mapping for Part"),
        ({"settings": {"a": b"x"}}, "settings.a is b'x', but should be a valid JSON value"),
        ({"settings": {"a": {"b": [0.0, 1e999]}}}, "settings.a.b[1] is inf, but should be a fin"),
        ({"settings": {1: 2}}, "settings has the key 1, but keys should be text"),
        ({"settings": [1]}, "settings is [1], but should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(data: object, said: str) -> None:
    (problem,) = filled(data)[1]
    assert problem.startswith(f"file: model.{said}")
