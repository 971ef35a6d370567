"""Every name stands for one thing."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import loongplug

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent


def test_no_two_public_classes_share_a_name() -> None:
    found = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(PACKAGE))
    assert len(found) > 300
    assert not {name: where for name, where in found.items() if len(where) > 1}
