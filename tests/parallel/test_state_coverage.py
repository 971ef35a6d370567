"""A snapshot covers what the installed Megatron keeps; what is new upstream fails here."""

import ast
import warnings
from pathlib import Path

import megatron.core
import pytest
import reviewed_globals

from loongplug.parallel.megatron_globals import (
    OTHER_GLOBALS,
    PROCESS_WIDE,
    STATE_NAMES,
    values_at_start,
)

CORE = Path(megatron.core.__file__).parent


def _tree(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_text())


STATE_TREE = _tree(CORE / "parallel_state.py")


class _Kept:
    """What a file keeps values in: see reviewed_globals.py."""

    def __init__(self, tree: ast.Module) -> None:
        self.globals: set[str] = set()
        self.class_attributes: set[str] = set()
        self.cached: set[str] = set()
        self._classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        self._classes.add("cls")
        for node in ast.walk(tree):
            self._look_at(node)

    def _look_at(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global):
            self.globals.update(node.names)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            # Class.attribute = ..., or Class.attribute[...] = ...
            target = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in self._classes:
                self.class_attributes.add(ast.unparse(target))
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(called).rsplit(".", 1)[-1] in ("lru_cache", "cache"):
                    self.cached.add(node.name)


@pytest.mark.quick
def test_every_global_of_parallel_state_is_covered() -> None:
    assert _Kept(STATE_TREE).globals <= {*STATE_NAMES, *PROCESS_WIDE}
    # Some are never under a global statement.
    assigned = {
        target.id
        for node in STATE_TREE.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith("_")
    }
    assert assigned == {*STATE_NAMES, *PROCESS_WIDE}


@pytest.mark.quick
def test_values_at_the_start_are_new_ones_each_time() -> None:
    values_at_start()["_HYBRID_DP_CP_GROUPS"][2] = "group"
    assert values_at_start()["_HYBRID_DP_CP_GROUPS"] == {}


def test_what_other_modules_keep_has_been_reviewed() -> None:
    found = {
        name: _Kept(_tree(path))
        for path in sorted(CORE.rglob("*.py"))
        if not (name := str(path.relative_to(CORE))).startswith(reviewed_globals.UNUSED)
    }
    del found["parallel_state.py"]
    for what, reviewed in {
        "globals": reviewed_globals.GLOBALS,
        "class_attributes": reviewed_globals.CLASS_ATTRIBUTES,
        "cached": reviewed_globals.CACHED,
    }.items():
        kept = {name: names for name, each in found.items() if (names := getattr(each, what))}
        assert kept == reviewed, f"{what}: look at what is new, then change reviewed_globals.py"


@pytest.mark.quick
def test_globals_of_other_modules_start_as_their_source_says() -> None:
    for where, name, start in OTHER_GLOBALS:
        written = [
            ast.literal_eval(node.value)
            for node in _tree(Path(where["__file__"])).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(target, ast.Name) and target.id == name
        ]
        assert written == [start], name
