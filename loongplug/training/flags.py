"""The command line: Megatron's flags, LoongPlug's own, and Hydra overrides among them."""

import argparse
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from loongplug.training.own_flags import add_own_flags
from loongplug.training.typed import closest

# An override's key has no slash, as a path would have.
_OVERRIDE = re.compile(r"\+{0,2}[\w.]+=.*", re.DOTALL)
_LINES = Path(__file__).with_name("other_trainers.txt").read_text(encoding="utf-8").splitlines()
_SAID = (line.partition(": ") for line in _LINES if line and not line.startswith("#"))
# In our words, by the name of another trainer's flag.
OURS = {name: said for names, _, said in _SAID for name in names.split()}
PER_DEVICE, ACCUMULATION = "per-device-train-batch-size", "gradient-accumulation-steps"


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line taken apart; ``flags`` were given, of all ``options``, by names in args."""

    args: Namespace
    flags: Mapping[str, str]
    options: Mapping[str, str]
    overrides: tuple[str, ...]


class _Help(argparse.HelpFormatter):
    """Shows help texts with a bare percent sign, which some of Megatron's have, as they are."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (TypeError, ValueError, KeyError):
            return action.help or ""


class _ShortHelp(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        print(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"), end="")
        raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage of a thousand lines and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse ``argv``; imports ``megatron.training``, so the platform has to be active.

    ValueError names unknown flags, each with its closest known one, and values of a wrong kind.
    """
    parser = whole_parser()
    args, rest, overrides = take_apart(argv, parser)
    options = {
        action.dest: action.option_strings[0] for action in parser._actions if action.option_strings
    }
    for action in parser._actions:
        action.default = SUPPRESS
    given = vars(parser.parse_known_args(rest)[0])
    return CommandLine(
        args=args,
        flags={name: options[name] for name in given},
        options=options,
        overrides=tuple(overrides),
    )


def take_apart(
    argv: Sequence[str], parser: argparse.ArgumentParser, *, ranks: int | None = None
) -> tuple[Namespace, list[str], list[str]]:
    """Arguments, flags and overrides of ``argv``; ValueError as :func:`read_command_line` raises.

    ``ranks``, how many the run has, helps to say what another trainer's size of a batch is here.
    """
    overrides, rest = _split_overrides(argv, parser)
    args, left_over = parser.parse_known_args(rest)
    if left_over:
        refuse_unknown(left_over, parser._option_string_actions, args, ranks=ranks)
    return args, rest, overrides


def without_flags(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """``argv`` less the flags of these names in args, with their values; the rest stays."""
    options = whole_parser()._option_string_actions
    kept: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, has_value, _ = token.partition("=")
        action = options.get(flag)
        if action is None or action.dest not in names:
            kept.append(token)
            continue
        most = 1 if action.nargs in (None, "?") else action.nargs
        most = 0 if has_value else most if isinstance(most, int) else len(tokens)
        for _ in range(most):  # an override may be a single value
            again = not tokens or tokens[0].partition("=")[0] in options
            if again or (most > 1 and _OVERRIDE.fullmatch(tokens[0])):
                break
            del tokens[0]
    return kept


def own_parser() -> argparse.ArgumentParser:
    """A parser of LoongPlug's own flags; no import of torch."""
    parser = _Parser(
        prog="loongplug/train.py",
        usage="torchrun ... %(prog)s (--model-name NAME | --config-file PATH | --load-hf DIR) "
        "[flags of LoongPlug and Megatron] [model.key=value ...]",
        allow_abbrev=False,
        formatter_class=_Help,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="the flags of most runs")
    parser.add_argument("--help-all", action="help", help="every flag")
    add_own_flags(parser)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """A parser of all flags; imports ``megatron.training``, so the platform has to be active."""
    from megatron.training.arguments import add_megatron_arguments

    parser = own_parser()
    add_megatron_arguments(parser)
    for action in parser._actions:
        if action.dest == "dataloader_type":
            action.choices = [*(action.choices or ()), "energon"]
        if callable(action.type) and action.type not in (int, float, str, bool):
            action.type = _speaking(action.type, action.choices)
    return parser


def _speaking(convert: Callable[[str], Any], choices: Iterable[Any] | None) -> Callable[[str], Any]:
    """``convert`` with any failure turned into a sentence; some converters raise KeyError."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except Exception as error:
            names = [item.name for item in choices or () if isinstance(item, Enum)]
            expected = f" (choose from {', '.join(names)})" if names else ""
            raise argparse.ArgumentTypeError(f"invalid value {text!r}{expected}") from error

    return converted


def _split_overrides(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Take overrides out first: a flag with any number of values would swallow one behind it."""
    overrides, rest = [], []
    for index, token in enumerate(argv):
        before = parser._option_string_actions.get(argv[index - 1]) if index else None
        is_value = before is not None and before.nargs != 0
        if _OVERRIDE.fullmatch(token) and not is_value:
            overrides.append(token)
        else:
            rest.append(token)
    return overrides, rest


def refuse_unknown(
    left_over: Sequence[str], known: Collection[str], args: Namespace, *, ranks: int | None
) -> NoReturn:
    """Raise ValueError with one line for each flag of ``left_over``, none of which is ``known``.

    What stands behind one counts as its value. ``args`` are the other flags, and ``ranks`` how many
    the run has, if that is known.
    """
    problems = []
    unknown: dict[str, str] = {}
    for token in left_over:
        if token.startswith("-") and not token[1:2].isdigit():
            flag, _, value = token.partition("=")
            unknown[flag] = value
        elif token.lower() in ("true", "false") and (not unknown or unknown[flag]):
            problems.append(f"{token} belongs to no flag: switches such as --bf16 take no value")
        elif unknown:
            unknown[flag] = f"{unknown[flag]} {token}".strip()
        else:
            problems.append(f"{token} belongs to no flag and is not an override key=value")
    theirs = {_plain(flag): value for flag, value in unknown.items()}
    together: dict[str, list[str]] = {}
    for flag in unknown:
        match = closest(f"--{_plain(flag)}", known)
        other = f"the closest is {match}" if match else "--help-all lists them all"
        said = in_our_words(_plain(flag), theirs, args, ranks=ranks) or other
        together.setdefault(said, []).append(flag)
    problems += [f"there is no flag {', '.join(flags)}; {said}" for said, flags in together.items()]
    raise ValueError("\n".join(problems))


def in_our_words(
    name: str, theirs: Mapping[str, str], args: Namespace, *, ranks: int | None
) -> str | None:
    """What ``name``, one of the flags with values ``theirs``, is here; None for what is unknown."""
    if name in (PER_DEVICE, ACCUMULATION):
        return f"here it is {_batch(theirs, args, ranks=ranks)}"
    words, value = OURS.get(name), theirs[name]
    if words is None or words.startswith("leave it out"):
        return words
    if value.lower() == "false" and not {"{}", "true,"} & {*words.split()}:
        return "leave it out"
    return f"here it is {words.format(value.lower() if '.freeze=' in words else value or 'VALUE')}"


def _batch(theirs: Mapping[str, str], args: Namespace, *, ranks: int | None) -> str:
    micro = theirs.get(PER_DEVICE) or args.micro_batch_size or "B"
    times = theirs.get(ACCUMULATION) or "1"
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    tp, pp, cp = (size or 1 for size in (*sizes, args.context_parallel_size))
    replicas, rest = divmod(ranks or 1, tp * pp * cp)
    if ranks is None or rest or not f"{micro}{times}".isdecimal():
        whole = f"G, where G is {micro} x replicas x {times} of accumulation, and replicas are"
        return f"--micro-batch-size {micro} --global-batch-size {whole} ranks / (tp x pp x cp)"
    whole = f"{int(micro) * replicas * int(times)}: {micro} x {replicas} replicas ({ranks} ranks"
    return (
        f"--micro-batch-size {micro} --global-batch-size {whole} / (tp {tp} x pp {pp} x cp {cp}))"
        f" x {times} of accumulation"
    )


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()
