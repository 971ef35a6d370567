"""The table of modes alone knows which mode is on, and two readers what operations mean.

A third reader of a plan would be one more dialect to keep in step.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import loongplug
from loongplug.hetero import modes, operations, policies
from loongplug.hetero.operations import BEGIN, END, Backward, Encode, EncoderStep, Operation

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent
TABLE = PACKAGE / "hetero" / "modes.py"
MODES = {name: each for name, each in vars(modes).items() if isinstance(each, modes.Mode)}
ASKED = {*MODES, *(part.__name__ for each in MODES.values() for part in (each.policy, each.place))}
# What a mode is called: by itself, by an encoder's YAML, by the schedule's flag.
WORDS = {mode.name for mode in MODES.values()} | {*modes.NAMED, *modes.SCHEDULED, "own_ranks"}
OURS = {f"loongplug.hetero.{name}" for name in ("modes", "policies", "placement")}
# The flags that ask for a mode, and who reads them.
FLAGS = {"enable_encoder_hetero_dp", "enable_full_hetero_dp", "full_hetero_dp_schedule"}
FLAGS_READ = {
    *(PACKAGE / "training" / name for name in ("flags.py", "rules/hetero.py")),
    PACKAGE / "verify" / "flags.py",
}


def asked(tree: ast.AST, *, flags: bool) -> Iterator[str]:
    """Where code asks which mode is on: by its constant, word, policy or placement, or its flag."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=imported) if module in OURS:
                yield from (each.name for each in imported if each.name in ASKED)
            case ast.Attribute(attr=attr) if attr in MODES or (flags and attr in FLAGS):
                yield attr
            case ast.Constant(value=str(value)) if flags and value in FLAGS:
                yield value
            case ast.Compare(left=left, comparators=others):
                for side in (left, *others):
                    for each in getattr(side, "elts", [side]):  # of a tuple, a list or a set
                        match each:
                            case ast.Constant(value=str(value)) if value in WORDS:
                                yield value
                            case ast.Attribute(attr="policy" | "place" as attr) if side is left:
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
        "if args.enable_full_hetero_dp: pass",
        "getattr(args, 'enable_full_hetero_dp')",
        "if mode.place is mine: pass",
        "if encoder.mode in ('encoder_hetero_dp', None): pass",
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
            "collections", "collections.abc", "dataclasses", "enum", "functools", "itertools",
            "typing",
            "loongplug.hetero.operations", "loongplug.hetero.balance",
        }  # fmt: skip


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_table_says_whether_encoders_work_outside_of_the_schedule(
    name: str, training: bool, count: int
) -> None:
    """On every rank alike, also on one that has nothing to encode in a step."""
    mode, replicas = MODES[name], 4
    for replica in range(replicas):
        step = EncoderStep(
            encoder_replicas=tuple((number % replicas,) for number in range(count)),
            replicas=replicas,
            replica=replica,
            consumes=True,
            training=training,
            trains=training,
            last_stage=True,
        )
        for when, done in mode.policy(step).items():
            for each in done:
                if isinstance(each, Encode | Backward):
                    assert (when in (BEGIN, END)) == mode.outside_schedule


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
    files = [
        file
        for room in ("loongplug", "benchmarks")
        for file in (PACKAGE.parent / room).rglob("*.py")
    ]
    found = {str(file.relative_to(PACKAGE.parent)): looked_at(file.read_text()) for file in files}
    assert {file for file, operations in found.items() if operations} == READERS
    assert found["loongplug/hetero/executed_step.py"] == OPERATIONS
