"""The table of modes is the one place that knows which mode is on."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import loongplug
from loongplug.hetero import encoder_steps, modes, operations, policies
from loongplug.hetero.encoder_steps import EncoderStep
from loongplug.hetero.operations import BEGIN, END, Backward, Encode

pytestmark = pytest.mark.quick

PACKAGE = Path(loongplug.__file__).parent
TABLE = PACKAGE / "hetero" / "modes.py"
MODES = {name: each for name, each in vars(modes).items() if isinstance(each, modes.Mode)}
POLICIES = {each.policy.__name__ for each in MODES.values()}
PLACES = {each.place.__name__ for each in MODES.values()}
ASKED = {*MODES, *POLICIES, *PLACES}
TABLES = {"NAMED", "SCHEDULED", "IN_A_WORD"}
# What a mode is called: by itself, by an encoder's YAML, by the schedule's flag.
WORDS = {mode.name for mode in MODES.values()} | {*modes.NAMED, *modes.SCHEDULED, "own_ranks"}
OURS = {f"loongplug.hetero.{name}" for name in ("modes", "policies", "placement")}
# The flags that ask for a mode.
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
            case ast.Attribute(value=ast.Name(id="policies" | "placement"), attr=attr):
                yield from {attr} & ASKED
            case ast.Constant(value=str(value)) if flags and value in FLAGS:
                yield value
            case ast.MatchValue(value=ast.Constant(value=str(value))) if value in WORDS:
                yield value
            case ast.Dict(keys=keys) if words_in(keys):
                yield "something is chosen by a mode's word"
            case ast.Subscript(value=table, slice=key) if ends_in(table, TABLES) and is_fixed(key):
                yield "one mode is taken out of a table"
            case ast.Call(func=ast.Attribute(value=table), args=[key, *_]) if ends_in(
                table, TABLES
            ) and is_fixed(key):
                yield "one mode is taken out of a table"
            case ast.Compare(left=left, comparators=others):
                sides = list(flat([left, *others]))
                attributes = (each for each in sides if isinstance(each, ast.Attribute))
                if any(each.attr in ("policy", "place") for each in attributes):
                    yield "a policy or placement is compared"
                if words_in(sides):
                    yield "something is compared with a mode's word"
                if any(ends_in(each, {"mode", *FLAGS}) for each in sides) and any(
                    is_constant(each) for each in sides
                ):
                    yield "a mode is compared with a constant"
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr="policy"), _]):
                yield "isinstance of a policy"


def flat(sides: Iterable[ast.expr | None]) -> Iterator[ast.expr]:
    """The sides of a comparison, and what stands in tuples, lists and sets among them."""
    for side in sides:
        match side:
            case ast.Tuple(elts=inside) | ast.List(elts=inside) | ast.Set(elts=inside):
                yield from flat(inside)
            case ast.Starred(value=inner) | ast.NamedExpr(value=inner):
                yield from flat([inner])
            case ast.expr():
                yield side


def words_in(expressions: Iterable[ast.expr | None]) -> set[str]:
    return {x.value for x in flat(expressions) if isinstance(x, ast.Constant)} & WORDS


def ends_in(expression: ast.expr, names: set[str]) -> bool:
    """Whether it is one of these names, or an attribute of one."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
    return False


def is_fixed(expression: ast.expr) -> bool:
    """Whether it is a text, or a constant of one."""
    is_text = isinstance(expression, ast.Constant) and isinstance(expression.value, str)
    return is_text or is_constant(expression)


def is_constant(expression: ast.expr) -> bool:
    """Whether it is the name of a constant, and that is no table of modes."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper() and name not in TABLES
    return False


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
        "schedule = args.full_hetero_dp_schedule",
        "if schedule == 'streamed': pass",
        "if asked not in ('separated', 'streamed'): pass",
        "if encoder.mode == 'encoder_hetero_dp': pass",
        "if self.mode == STREAMED: pass",
        "if case.mode not in (*MODES, work.STREAMED): pass",
        "match encoder.mode:\n    case 'encoder_hetero_dp': pass",
        "SCHEDULED[STREAMED]",
        "modes.NAMED['uniform']",
        "NAMED.get('uniform')",
        "done = {'separated': before, 'streamed': within}[schedule]",
    ],
)
def test_it_would_be_seen(code: str) -> None:
    assert list(asked(ast.parse(code), flags=True))


@pytest.mark.parametrize(
    "code",
    [
        "if mode.fills_bubbles: pass",
        "if encoder.mode not in (None, *NAMED): pass",
        "if self.mode not in IN_A_WORD: pass",
        "IN_A_WORD[self.mode].apart",
        "if each.level == UNIFORM: pass",
    ],
)
def test_what_the_table_says_may_be_asked(code: str) -> None:
    assert not list(asked(ast.parse(code), flags=True))


def test_a_policy_is_pure() -> None:
    """It knows operations, and neither tensors nor ranks nor Megatron."""
    for module in (policies, operations, encoder_steps):
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
            "loongplug.hetero.operations", "loongplug.hetero.encoder_steps",
            "loongplug.hetero.balance",
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
