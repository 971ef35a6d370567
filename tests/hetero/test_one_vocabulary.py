"""What the operations of a step's plan mean is told in two places: who does them, who counts them.

A third one that looks at what an operation is would be one more dialect to keep in step.
"""

import ast
from pathlib import Path
from typing import get_args

import pytest

from loongplug.hetero.operations import Operation

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
OPERATIONS = {each.__name__ for each in get_args(Operation)}
READERS = {
    "loongplug/hetero/executed_step.py",
    "benchmarks/modes/pipeline_clock.py",  # plans to the clock's acts
}


def looked_at(source: str) -> set[str]:
    """Those operations that some code asks for, by `match` or by `isinstance`."""
    tree = ast.parse(source)
    names = {
        each.asname or each.name: each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "loongplug.hetero.operations"
        for each in node.names
        if each.name in OPERATIONS | {"Operation"}
    }
    asked: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=each) | ast.Call(func=ast.Name("isinstance"), args=[_, each]):
                asked.append(each)
    inside = (part for each in asked for part in ast.walk(each))
    return {names[part.id] for part in inside if isinstance(part, ast.Name) and part.id in names}


def test_two_readers_alone_ask_what_an_operation_is() -> None:
    files = [file for room in ("loongplug", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): looked_at(file.read_text()) for file in files}
    assert {file for file, operations in found.items() if operations} == READERS
    assert found["loongplug/hetero/executed_step.py"] == OPERATIONS
