"""The command line: Megatron's flags, LoongPlug's own, and Hydra overrides among them."""

import argparse
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from loongplug.context.row_parts import BALANCES
from loongplug.data.bad_samples import BAD_SAMPLE_POLICIES
from loongplug.data.packing import LOOK_AHEAD
from loongplug.data.pixel_limits import TRANSPARENCIES
from loongplug.data.rows import MAX_ROW_MIB
from loongplug.hetero.modes import SCHEDULES
from loongplug.platform.choice import add_device_flag
from loongplug.schedule.tensor_names import NAMES
from loongplug.training.unknown_flags import refuse_unknown

PHASES = ("pretrain", "sft")

# An override's key has no slash, as a path would have.
_OVERRIDE = re.compile(r"\+{0,2}[\w.]+=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line taken apart; ``flags`` are the flags the user gave, by their names in args,
    ``options`` all that there are.
    """

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
    """Prints what users need, and ends."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        print(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"), end="")
        raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage of a thousand lines and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse ``argv``; imports ``megatron.training``, so the platform has to be active.

    Raises:
        ValueError: unknown flags, each with its closest known one, or a value of the wrong kind.
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
    """``argv`` less the flags of these names in args, with their values; the order stays.

    As :func:`read_command_line`, it imports ``megatron.training``. What stands in no flag's place
    (overrides, unknown flags) is left where it is.
    """
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
        most = _most_values(action) if not has_value else 0
        while tokens and most and not _begins_anew(tokens[0], options, single=most == 1):
            del tokens[0]
            most -= 1
    return kept


def _most_values(action: argparse.Action) -> int:
    if action.nargs is None or action.nargs == "?":
        return 1
    return action.nargs if isinstance(action.nargs, int) else 1000


def _begins_anew(token: str, options: Mapping[str, object], *, single: bool) -> bool:
    """Whether ``token`` is not a value of the flag before it; an override may be a single one."""
    return token.partition("=")[0] in options or (
        not single and _OVERRIDE.fullmatch(token) is not None
    )


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
    _add_own_flags(parser)
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


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    """By subject, as ``--help`` lists them, in front of Megatron's."""
    group: argparse._ArgumentGroup

    def subject(title: str) -> None:
        nonlocal group
        group = parser.add_argument_group(title=f"LoongPlug: {title}")

    def switch(flag: str, help: str) -> None:
        group.add_argument(flag, action="store_true", help=help)

    def value(flag: str, metavar: str, help: str, **options: Any) -> None:
        group.add_argument(flag, metavar=metavar, help=help, **options)

    def values(flag: str, metavar: str, help: str, **options: Any) -> None:
        value(flag, metavar, help, nargs="+", default=[], **options)

    subject("the model")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--model-name", metavar="NAME", help="a model of configs/models/<family>/NAME.yaml"
    )
    source.add_argument("--config-file", metavar="PATH", help="your own YAML file of a model")
    group.add_argument(
        "--training-phase",
        choices=PHASES,
        help="pretrain: loss on all text; sft: loss on the assistant's answers",
    )
    add_device_flag(group)
    values(
        "--trusted-packages",
        "PACKAGE",
        "your packages: a _target_ in the YAML may name their config classes",
    )
    switch("--print-config", "print the model's YAML and exit")
    subject("its weights")
    value(
        "--load-hf",
        "DIR",
        "start from a Hugging Face folder; without --model-name and --config-file, its config.json"
        " says what model it is",
    )
    value("--save-hf", "DIR", "export to a Hugging Face folder at the end")
    value("--load-lora", "DIR", "start the adapters from a folder that --save-lora or peft wrote")
    value("--save-lora", "DIR", "write only the adapters at the end; peft can load them")
    subject("data")
    switch("--packing", "put several samples into each sequence; batch sizes then count sequences")
    value(
        "--packing-look-ahead",
        "N",
        f"choose the samples of a sequence from the next N (default: {LOOK_AHEAD})",
        type=int,
        default=LOOK_AHEAD,
    )
    value(
        "--media-root",
        "DIR",
        "relative paths of images and videos start here; default: the folder of each data file",
    )
    switch(
        "--confine-media",
        "refuse images and videos outside of that folder, also behind links",
    )
    value(
        "--video-fps",
        "N",
        "frames per second to take from video files, if the row does not say it; default: the"
        " model folder's",
        type=float,
    )
    for kind, each in (
        ("", "each image"),
        ("video-", "each video (counted as its processor counts)"),
    ):
        for bound, least in (("min", "at least"), ("max", "at most")):
            value(
                f"--{kind}{bound}-pixels",
                "N",
                f"resize {each} to {least} N pixels; default: the model folder's",
                type=int,
            )
    group.add_argument(
        "--transparency",
        choices=TRANSPARENCIES,
        help="what is transparent in images becomes white (default), or drop: shows its colours",
    )
    group.add_argument(
        "--bad-sample",
        choices=BAD_SAMPLE_POLICIES,
        default="fatal",
        help="skip: leave a bad sample out and count it; fatal (default): it ends the run",
    )
    value(
        "--max-row-mib",
        "N",
        f"a row larger than N MiB is a bad sample (default: {MAX_ROW_MIB})",
        type=int,
        default=MAX_ROW_MIB,
    )
    switch(
        "--special-tokens-in-text",
        "read special tokens in the text of rows as special tokens; default: as plain text",
    )
    value("--ignore-keys", "KEY,...", "unused keys anywhere to count, not to refuse", default="")
    value("--columns", "OURS=THEIRS,...", "our keys for those of rows: query=question", default="")
    switch("--literal-markers", "do not count <image> and the like as text in rows without media")
    group.add_argument(
        "--multi-turn",
        choices=("split", "last"),
        help="of turns that the chat template renders differently later: split (default with"
        " --packing) trains each answer as it is served; last: those behind the last question",
    )
    switch(
        "--train-template-thought",
        "train the thought without content that the chat template puts before an answer",
    )
    value("--index-dir", "DIR", "where indexes of rows lie; default: beside the data", type=Path)
    value("--valid-share", "X", "validate on this share of training rows, not train", type=float)
    value(
        "--epochs",
        "N",
        "train until each row of the data has come N times, in place of --train-iters",
        type=int,
    )
    subject("which parameters are trained")
    values(
        "--freeze-parameters",
        "PATTERN",
        "freeze the parameters whose full names match, such as 'image_encoder.*' '*norm*'",
    )
    values(
        "--train-parameters",
        "PATTERN",
        "train the parameters whose full names match, even if their module is frozen",
    )
    subject("the encoder's layout")
    switch(
        "--enable-encoder-hetero-dp",
        "heterogeneous DP: the ranks of a tensor parallel group encode different microbatches",
    )
    switch(
        "--enable-full-hetero-dp",
        "full separation: all ranks encode before the decoder's schedule and after it",
    )
    group.add_argument(
        "--full-hetero-dp-schedule",
        choices=SCHEDULES,
        default="auto",
        help="full separation: streamed lets encoders work where the pipeline would wait; auto"
        " (default) does so on CPU ranks where that can be done and is faster; separated does not",
    )
    value(
        "--full-hetero-dp-encoder-speed",
        "X",
        "streamed plans count X operations of an encoder in the time of one of the decoder's"
        " (default: 1)",
        type=float,
    )
    switch(
        "--use-vit-dp-balance",
        "give the encoder's replicas images of about equal cost in each step",
    )
    value(
        "--dp-balance-trigger-threshold-vit",
        "X",
        "do so only if the slowest replica would have 1 + X times the mean cost (default: 0.2)",
        type=float,
    )
    subject("rows on several ranks")
    group.add_argument(
        "--cp-balance",
        choices=BALANCES,
        default="zigzag",
        help="with --context-parallel-size and --packing, lpt: each pack is split by its samples,"
        " so that ranks have equal work in attention; zigzag (default): all rows alike",
    )
    subject("memory of the host")
    away = "in host memory while the decoder works"
    switch(
        "--full-hetero-dp-cpu-offload",
        f"full separation: features and their gradients are {away}, except for two microbatches",
    )
    switch(
        "--offload-encoder-activations",
        f"full separation: what the encoder's backward needs is {away}",
    )
    switch(
        "--offload-encoder-state",
        f"full separation: the encoder's parameters, gradients and optimizer state are {away}",
    )
    values(
        "--offload-tensors",
        "NAME",
        "with --fine-grained-activation-offloading: which activations of the decoder's layers are"
        " in host memory between forward and backward: " + ", ".join(NAMES),
        choices=NAMES,
    )
    subject("what a run leaves")
    value(
        "--keep-checkpoints",
        "N",
        "keep only the newest N checkpoints and the one with the best validation loss",
        type=int,
    )
    value(
        "--eval-generate",
        "N",
        "at each evaluation, answer the first N rows of the validation data and log how many are"
        " right",
        type=int,
    )
    value("--metrics-json", "FILE", "write the run's metrics to FILE")
    value(
        "--metrics-name",
        "NAME",
        "put them under NAME into that file, and keep what an earlier run wrote there",
    )
    value("--trace", "DIR", "write the events of every rank to DIR; loongplug trace reads them")


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
