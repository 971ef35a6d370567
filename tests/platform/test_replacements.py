"""The mechanism, on a made-up package."""

import sys
import types
from collections.abc import Iterator

import pytest

from loongplug.platform.replacements import Replacement, ReplacementError, ReplacementTable

pytestmark = pytest.mark.quick


class _Base:
    def inherited(self) -> str:
        return "original"


class _Thing(_Base):
    @staticmethod
    def static(value: int) -> int:
        return value


def _call(value: int, *, twice: bool = False) -> int:
    return value


def _new_call(value: int) -> int:
    return -value


@pytest.fixture
def upstream() -> Iterator[types.ModuleType]:
    """``fakeup`` with a function, a class and a constant; ``fakeuser`` imports by value."""
    module = types.ModuleType("fakeup")
    module.__dict__.update(call=_call, Thing=_Thing, empty=(), sub=types.SimpleNamespace(x=1))
    sys.modules["fakeup"] = module
    for name in ("fakeuser", "fakeuser.deep", "stranger"):
        sys.modules[name] = types.ModuleType(name)
    yield module
    for name in ("fakeup", "fakeuser", "fakeuser.deep", "stranger"):
        del sys.modules[name]


def _row(target: str, **fields: object) -> Replacement:
    return Replacement(target=target, reason="a test", **{"replacement": _new_call, **fields})


def _table(*rows: Replacement) -> ReplacementTable:
    return ReplacementTable("test", rows, importers=["fakeuser"])


def test_apply_and_undo_restore_the_very_objects(upstream: types.ModuleType) -> None:
    own = vars(upstream.Thing)["static"]
    table = _table(_row("fakeup.call"), _row("fakeup.Thing.static"), _row("fakeup.sub.x"))
    table.apply()
    assert upstream.call is _new_call
    assert upstream.Thing.static(3) == -3
    assert upstream.sub.x is _new_call
    table.undo()
    assert upstream.call is _call
    assert vars(upstream.Thing)["static"] is own  # the staticmethod, not what it answers with
    assert upstream.sub.x == 1


def test_inherited_names_are_inherited_again(upstream: types.ModuleType) -> None:
    table = _table(_row("fakeup.Thing.inherited", replacement=lambda self: "new"))
    table.apply()
    assert upstream.Thing().inherited() == "new"
    assert _Base().inherited() == "original"
    table.undo()
    assert upstream.Thing().inherited() == "original"
    assert "inherited" not in vars(upstream.Thing)


def test_both_are_idempotent(upstream: types.ModuleType) -> None:
    table = _table(_row("fakeup.call", wrapper=lambda original: lambda value: original(value) + 1))
    table.apply()
    table.apply()
    assert upstream.call(1) == 2  # wrapped once
    table.undo()
    table.undo()
    assert upstream.call is _call


def test_by_value_imports_follow_both_ways(upstream: types.ModuleType) -> None:
    user, deep, stranger = (sys.modules[n] for n in ("fakeuser", "fakeuser.deep", "stranger"))
    before = {"renamed": upstream.call, "nothing": (), "Thing": upstream.Thing}
    vars(user).update(before)
    stranger.call = upstream.call
    table = _table(_row("fakeup.call"), _row("fakeup.empty", replacement=[1]))
    table.apply()
    deep.call = upstream.call  # imported while active
    assert user.renamed is _new_call
    assert user.nothing == ()  # () is one object: not every () means fakeup.empty
    assert user.Thing is _Thing
    assert stranger.call is _call
    table.undo()
    assert user.renamed is _call
    assert deep.call is _call


def test_originals_that_are_one_object(upstream: types.ModuleType) -> None:
    upstream.alias = upstream.call
    table = _table(_row("fakeup.call", replacement=len), _row("fakeup.alias", replacement=max))
    table.apply()
    assert (upstream.call, upstream.alias) == (len, max)
    table.undo()
    assert upstream.call is upstream.alias is _call


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("fakeup.gone", "module 'fakeup' has no attribute 'gone'"),
        ("fakeup.Thing.gone", "'_Thing' has no attribute 'gone'"),
        ("fakeup.gone.deeper", "module 'fakeup' has no attribute 'gone'"),
        ("no_such_package.call", "No module named 'no_such_package'"),
    ],
)
def test_moved_target_is_named(upstream: types.ModuleType, target: str, found: str) -> None:
    table = _table(_row("fakeup.call"), _row(target))
    with pytest.raises(ReplacementError) as caught:
        table.apply()
    assert str(caught.value).startswith(f"{target}: expected ")
    assert found in str(caught.value)
    assert upstream.call is _call  # nothing was applied


def _renamed(number: int, *, twice: bool = False) -> int: ...
def _removed(value: int) -> int: ...
def _by_place(value: int, twice: bool = False) -> int: ...
def _other_types(value: float, *, twice: bool = True) -> float: ...


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (_renamed, "(number, *, twice)"),
        (_removed, "(value)"),
        (_by_place, "(value, twice)"),
        (_other_types, None),
    ],
)
def test_changed_parameters_are_named(
    upstream: types.ModuleType, changed: types.FunctionType, found: str | None
) -> None:
    table = _table(_row("fakeup.call", parameters="(value, *, twice)"))
    upstream.call = changed
    if found is None:  # types and defaults may change
        table.apply()
        assert upstream.call is _new_call
        return
    with pytest.raises(ReplacementError) as caught:
        table.apply()
    said = f"fakeup.call: expected the parameters (value, *, twice), found {found};"
    assert str(caught.value).startswith(said)
    assert upstream.call is changed


def test_object_without_parameters(upstream: types.ModuleType) -> None:
    with pytest.raises(ReplacementError, match=r"fakeup\.empty: .* found no parameters \(tuple\)"):
        _table(_row("fakeup.empty", parameters="()")).apply()


def test_import_errors_inside_a_target_are_not_hidden(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenup.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        _table(_row("brokenup.call")).apply()
