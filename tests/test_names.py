"""Every name stands for one thing."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

import loongplug

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent


def shared(files: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Public classes of one name in several of the files, which are names and code."""
    found = defaultdict(list)
    for name, code in files:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    files = [(str(path.relative_to(PACKAGE)), path.read_text()) for path in PACKAGE.rglob("*.py")]
    assert len(files) > 300
    assert not shared(files)


def test_a_shared_name_would_be_seen() -> None:
    files = [("a.py", "class Piece: ..."), ("b.py", "if True:\n    class Piece: ...")]
    assert shared(files) == {"Piece": ["a.py", "b.py"]}
    assert not shared([("a.py", "class _Piece: ..."), ("b.py", "class _Piece: ...")])
