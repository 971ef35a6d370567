"""The table of modes is the one place that knows which mode is on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import loongplug
from loongplug.hetero import modes, operations, policies

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent
TABLE = PACKAGE / "hetero" / "modes.py"
MODES = {name: each for name, each in vars(modes).items() if isinstance(each, modes.Mode)}
POLICIES = {each.policy.__name__ for each in MODES.values()}
# The flags that ask for a mode, which a rule refuses together.
FLAGS = {"enable_encoder_hetero_dp", "enable_full_hetero_dp"}
FLAGS_READ = {TABLE, PACKAGE / "training" / "rules" / "hetero.py"}


def asked(tree: ast.AST, *, flags: bool) -> Iterator[str]:
    """Where code asks which mode is on: its constant, its name, its policy, the flag for it."""
    names = {mode.name for mode in MODES.values()}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="loongplug.hetero.modes", names=imported):
                yield from (each.name for each in imported if each.name in MODES)
            case ast.Attribute(value=ast.Name(id="modes"), attr=attr) if attr in MODES:
                yield attr
            case ast.Compare(left=left, comparators=others):
                for each in (left, *others):
                    if isinstance(each, ast.Constant) and each.value in names - {"uniform"}:
                        yield str(each.value)
                    if isinstance(each, ast.Attribute) and each.attr == "policy":
                        yield "a policy is compared"
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr="policy"), _]):
                yield "isinstance of a policy"
            case ast.ImportFrom(module="loongplug.hetero.policies", names=imported):
                yield from (each.name for each in imported if each.name in POLICIES)
            case ast.Attribute(attr=attr) if flags and attr in FLAGS:
                yield attr


def test_no_code_asks_which_mode_is_on() -> None:
    found = {
        str(path.relative_to(PACKAGE)): here
        for path in PACKAGE.rglob("*.py")
        if path != TABLE
        and (here := list(asked(ast.parse(path.read_text()), flags=path not in FLAGS_READ)))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "from loongplug.hetero.modes import UNIFORM",
        "if modes.FULL_HETERO_DP: pass",
        "if mode.name == 'full separation': pass",
        "if mode.policy is separated: pass",
        "isinstance(mode.policy, partial)",
        "from loongplug.hetero.policies import group_ahead",
        "if args.enable_full_hetero_dp: pass",
    ],
)
def test_it_would_be_seen(code: str) -> None:
    assert list(asked(ast.parse(code), flags=True))


def test_a_policy_is_pure() -> None:
    """It knows operations, and neither tensors nor ranks nor Megatron."""
    for module in (policies, operations):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {
            each.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for each in node.names
        }
        assert imported <= {
            "collections", "collections.abc", "dataclasses", "enum", "loongplug.hetero.operations",
        }  # fmt: skip
