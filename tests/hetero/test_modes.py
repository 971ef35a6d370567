"""The table of modes is the one place that knows which mode is on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import loongplug
from loongplug.hetero import modes, operations, policies, stream
from loongplug.hetero.operations import BEGIN, END, Encode, EncodeInForward, EncoderBackward
from loongplug.hetero.policies import EncoderStep

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent
TABLE = PACKAGE / "hetero" / "modes.py"
MODES = {name: each for name, each in vars(modes).items() if isinstance(each, modes.Mode)}
POLICIES = {each.policy.__name__ for each in MODES.values()}
PLACES = {each.place.__name__ for each in MODES.values()}
ASKED = {*MODES, *POLICIES, *PLACES}
OURS = {f"loongplug.hetero.{name}" for name in ("modes", "policies", "placement")}
# The flags that ask for a mode, which a rule refuses together.
FLAGS = {"enable_encoder_hetero_dp", "enable_full_hetero_dp"}
FLAGS_READ = {
    *(PACKAGE / "training" / name for name in ("flags.py", "rules/hetero.py")),
    PACKAGE / "verify" / "flags.py",
}


def asked(tree: ast.AST, *, flags: bool) -> Iterator[str]:
    """Where code asks which mode is on: by its constant, name, policy or placement, or its flag."""
    names = {mode.name for mode in MODES.values()}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=imported) if module in OURS:
                yield from (each.name for each in imported if each.name in ASKED)
            case ast.Attribute(attr=attr) if attr in MODES or (flags and attr in FLAGS):
                yield attr
            case ast.Attribute(value=ast.Name(id="policies" | "placement"), attr=attr):
                yield from {attr} & ASKED
            case ast.Constant(value=str(value)) if flags and value in FLAGS:
                yield value
            case ast.MatchValue(value=ast.Constant(value=str(value))) if value in names:
                yield value
            case ast.Compare(left=left, comparators=others):
                sides = [each for each in (left, *others) if isinstance(each, ast.Attribute)]
                words = {each.value for each in (left, *others) if isinstance(each, ast.Constant)}
                if any(each.attr in ("policy", "place") for each in sides):
                    yield "a policy or placement is compared"
                if words & names and any(each.attr == "name" for each in sides):
                    yield "a mode's name is compared"
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr="policy"), _]):
                yield "isinstance of a policy"


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
        "if mode.name == 'uniform': pass",
        "match mode.name:\n    case 'full separation': pass",
        "if mode.place is mine: pass",
        "from loongplug.hetero.placement import first_stage_dp",
        "x is m.FULL_HETERO_DP",
        "policies.separated",
        "getattr(args, 'enable_full_hetero_dp')",
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
    for module in (policies, operations, stream):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {
            each.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for each in node.names
        }
        assert imported <= {
            "collections", "collections.abc", "dataclasses", "enum", "typing",
            "loongplug.hetero.operations", "loongplug.hetero.stream",
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
                if isinstance(each, Encode | EncoderBackward | EncodeInForward):
                    assert (when in (BEGIN, END)) == mode.outside_schedule
