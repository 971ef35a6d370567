"""LoongPlug's own flags, by subject, as ``--help-all`` lists them in front of Megatron's."""

import argparse
from pathlib import Path
from typing import Any

from loongplug.context.row_parts import BALANCES
from loongplug.data.bad_samples import BAD_SAMPLE_POLICIES
from loongplug.data.data_options import MAX_ROW_MIB, TRANSPARENCIES
from loongplug.data.packing import LOOK_AHEAD
from loongplug.hetero.modes import SCHEDULES
from loongplug.platform.choice import add_device_flag
from loongplug.schedule.tensor_names import NAMES

PHASES = ("pretrain", "sft")


class _Subject:
    """A group of flags under a title."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self.group = parser.add_argument_group(title=f"LoongPlug: {title}")

    def switch(self, flag: str, help: str) -> None:
        self.group.add_argument(flag, action="store_true", help=help)

    def value(self, flag: str, metavar: str | None, help: str, **options: Any) -> None:
        self.group.add_argument(flag, metavar=metavar, help=help, **options)

    def values(self, flag: str, metavar: str, help: str, **options: Any) -> None:
        self.value(flag, metavar, help, nargs="+", default=[], **options)


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Every one of them, subject by subject."""
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_layout_flags(parser)
    _add_memory_and_output_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and the folders of its weights."""
    subject = _Subject(parser, "the model")
    source = subject.group.add_mutually_exclusive_group()
    source.add_argument(
        "--model-name", metavar="NAME", help="a model of configs/models/<family>/NAME.yaml"
    )
    source.add_argument("--config-file", metavar="PATH", help="your own YAML file of a model")
    subject.group.add_argument(
        "--training-phase",
        choices=PHASES,
        help="pretrain: loss on all text; sft: loss on the assistant's answers",
    )
    add_device_flag(subject.group)
    subject.values(
        "--trusted-packages",
        "PACKAGE",
        "your packages: a _target_ in the YAML may name their config classes",
    )
    subject.switch("--print-config", "print the model's YAML and exit")
    subject = _Subject(parser, "its weights")
    subject.value(
        "--load-hf",
        "DIR",
        "start from a Hugging Face folder; without --model-name and --config-file, its config.json"
        " says what model it is",
    )
    subject.value("--save-hf", "DIR", "export to a Hugging Face folder at the end")
    subject.value(
        "--load-lora", "DIR", "start the adapters from a folder that --save-lora or peft wrote"
    )
    subject.value("--save-lora", "DIR", "write only the adapters at the end; peft can load them")


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    """The rows, and what they become."""
    subject = _Subject(parser, "data")
    subject.switch(
        "--packing", "put several samples into each sequence; batch sizes then count sequences"
    )
    subject.value(
        "--packing-look-ahead",
        "N",
        f"choose the samples of a sequence from the next N (default: {LOOK_AHEAD})",
        type=int,
        default=LOOK_AHEAD,
    )
    subject.value(
        "--media-root",
        "DIR",
        "relative paths of images and videos start here; default: the folder of each data file",
    )
    subject.switch(
        "--confine-media",
        "refuse images and videos outside of that folder, also behind links",
    )
    subject.value(
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
            subject.value(
                f"--{kind}{bound}-pixels",
                "N",
                f"resize {each} to {least} N pixels; default: the model folder's",
                type=int,
            )
    subject.group.add_argument(
        "--transparency",
        choices=TRANSPARENCIES,
        help="what is transparent in images becomes white (default), or drop: shows its colours",
    )
    subject.group.add_argument(
        "--bad-sample",
        choices=BAD_SAMPLE_POLICIES,
        default="fatal",
        help="skip: leave a bad sample out and count it; fatal (default): it ends the run",
    )
    subject.value(
        "--max-row-mib",
        "N",
        f"a row larger than N MiB is a bad sample (default: {MAX_ROW_MIB})",
        type=int,
        default=MAX_ROW_MIB,
    )
    subject.switch(
        "--special-tokens-in-text",
        "read special tokens in the text of rows as special tokens; default: as plain text",
    )
    subject.value(
        "--ignore-keys", "KEY,...", "unused keys anywhere to count, not to refuse", default=""
    )
    subject.value(
        "--columns", "OURS=THEIRS,...", "our keys for those of rows: query=question", default=""
    )
    subject.switch(
        "--literal-markers", "do not count <image> and the like as text in rows without media"
    )
    subject.group.add_argument(
        "--multi-turn",
        choices=("split", "last"),
        help="of turns that the chat template renders differently later: split (default with"
        " --packing) trains each answer as it is served; last: those behind the last question",
    )
    subject.switch(
        "--train-template-thought",
        "train the thought without content that the chat template puts before an answer",
    )
    subject.value(
        "--index-dir", "DIR", "where indexes of rows lie; default: beside the data", type=Path
    )
    subject.value(
        "--valid-share", "X", "validate on this share of training rows, not train", type=float
    )
    subject.value(
        "--epochs",
        "N",
        "train until each row of the data has come N times, in place of --train-iters",
        type=int,
    )


def _add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """What trains, and where."""
    subject = _Subject(parser, "which parameters are trained")
    subject.values(
        "--freeze-parameters",
        "PATTERN",
        "freeze the parameters whose full names match, such as 'image_encoder.*' '*norm*'",
    )
    subject.values(
        "--train-parameters",
        "PATTERN",
        "train the parameters whose full names match, even if their module is frozen",
    )
    subject = _Subject(parser, "the encoder's layout")
    subject.switch(
        "--enable-encoder-hetero-dp",
        "heterogeneous DP: the ranks of a tensor parallel group encode different microbatches",
    )
    subject.switch(
        "--enable-full-hetero-dp",
        "full separation: all ranks encode before the decoder's schedule and after it",
    )
    subject.group.add_argument(
        "--full-hetero-dp-schedule",
        choices=SCHEDULES,
        default="auto",
        help="full separation: streamed lets encoders work where the pipeline would wait; auto"
        " (default) does so on CPU ranks where that can be done and is faster; separated does not",
    )
    subject.value(
        "--full-hetero-dp-encoder-speed",
        "X",
        "streamed plans count X operations of an encoder in the time of one of the decoder's"
        " (default: 1)",
        type=float,
    )
    subject.switch(
        "--use-vit-dp-balance",
        "give the encoder's replicas images of about equal cost in each step",
    )
    subject.value(
        "--dp-balance-trigger-threshold-vit",
        "X",
        "do so only if the slowest replica would have 1 + X times the mean cost (default: 0.2)",
        type=float,
    )
    subject = _Subject(parser, "rows on several ranks")
    subject.group.add_argument(
        "--cp-balance",
        choices=BALANCES,
        default="zigzag",
        help="with --context-parallel-size and --packing, lpt: each pack is split by its samples,"
        " so that ranks have equal work in attention; zigzag (default): all rows alike",
    )


def _add_memory_and_output_flags(parser: argparse.ArgumentParser) -> None:
    """What lies in the host's memory, and what a run leaves."""
    subject = _Subject(parser, "memory of the host")
    away = "in host memory while the decoder works"
    subject.switch(
        "--full-hetero-dp-cpu-offload",
        f"full separation: features and their gradients are {away}, except for two microbatches",
    )
    subject.switch(
        "--offload-encoder-activations",
        f"full separation: what the encoder's backward needs is {away}",
    )
    subject.switch(
        "--offload-encoder-state",
        f"full separation: the encoder's parameters, gradients and optimizer state are {away}",
    )
    subject.values(
        "--offload-tensors",
        "NAME",
        "with --fine-grained-activation-offloading: which activations of the decoder's layers are"
        " in host memory between forward and backward: " + ", ".join(NAMES),
        choices=NAMES,
    )
    subject = _Subject(parser, "what a run leaves")
    subject.value(
        "--keep-checkpoints",
        "N",
        "keep only the newest N checkpoints and the one with the best validation loss",
        type=int,
    )
    subject.value(
        "--eval-generate",
        "N",
        "at each evaluation, answer the first N rows of the validation data and log how many are"
        " right",
        type=int,
    )
    subject.value("--metrics-json", "FILE", "write the run's metrics to FILE")
    subject.value(
        "--metrics-name",
        "NAME",
        "put them under NAME into that file, and keep what an earlier run wrote there",
    )
    subject.value(
        "--trace", "DIR", "write the events of every rank to DIR; loongplug trace reads them"
    )
