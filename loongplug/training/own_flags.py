"""LoongPlug's own flags, by subject, as ``--help-all`` lists them in front of Megatron's."""

import argparse
from collections.abc import Callable
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


def _adder(group: Any) -> Callable[..., None]:
    """What adds a flag to a group: with the name of its value, and ... for several, or a switch."""

    def add(flag: str, help: str, **options: Any) -> None:
        name, _, value = flag.partition(" ")
        if value.endswith(" ..."):
            options |= {"nargs": "+", "default": []}
        if value:
            options["metavar"] = value.removesuffix(" ...")
        elif "choices" not in options:
            options["action"] = "store_true"
        group.add_argument(name, help=help, **options)

    return add


def _subject(parser: argparse.ArgumentParser, title: str) -> Callable[..., None]:
    return _adder(parser.add_argument_group(title=f"LoongPlug: {title}"))


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Every one of them, subject by subject."""
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_layout_flags(parser)
    _add_memory_and_output_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(title="LoongPlug: the model")
    source, flag = _adder(group.add_mutually_exclusive_group()), _adder(group)
    source("--model-name NAME", "a model of configs/models/<family>/NAME.yaml")
    source("--config-file PATH", "your own YAML file of a model")
    flag(
        "--training-phase",
        "pretrain: loss on all text; sft: loss on the assistant's answers",
        choices=PHASES,
    )
    add_device_flag(group)
    flag(
        "--trusted-packages PACKAGE ...",
        "your packages: a _target_ in the YAML may name their config classes",
    )
    flag("--print-config", "print the model's YAML and exit")
    flag = _subject(parser, "its weights")
    flag(
        "--load-hf DIR",
        "start from a Hugging Face folder; without --model-name and --config-file, its config.json"
        " says what model it is",
    )
    flag("--save-hf DIR", "export to a Hugging Face folder at the end")
    flag("--load-lora DIR", "start the adapters from a folder that --save-lora or peft wrote")
    flag("--save-lora DIR", "write only the adapters at the end; peft can load them")


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    flag = _subject(parser, "data")
    flag("--packing", "put several samples into each sequence; batch sizes then count sequences")
    flag(
        "--packing-look-ahead N",
        f"choose the samples of a sequence from the next N (default: {LOOK_AHEAD})",
        type=int,
        default=LOOK_AHEAD,
    )
    flag(
        "--media-root DIR",
        "relative paths of images and videos start here; default: the folder of each data file",
    )
    flag("--confine-media", "refuse images and videos outside of that folder, also behind links")
    flag(
        "--video-fps N",
        "frames per second to take from video files, if the row does not say it; default: the"
        " model folder's",
        type=float,
    )
    for kind, each in (
        ("", "each image"),
        ("video-", "each video (counted as its processor counts)"),
    ):
        for bound, least in (("min", "at least"), ("max", "at most")):
            flag(
                f"--{kind}{bound}-pixels N",
                f"resize {each} to {least} N pixels; default: the model folder's",
                type=int,
            )
    flag(
        "--transparency",
        "what is transparent in images becomes white (default), or drop: shows its colours",
        choices=TRANSPARENCIES,
    )
    flag(
        "--bad-sample",
        "skip: leave a bad sample out and count it; fatal (default): it ends the run",
        choices=BAD_SAMPLE_POLICIES,
        default="fatal",
    )
    flag(
        "--max-row-mib N",
        f"a row larger than N MiB is a bad sample (default: {MAX_ROW_MIB})",
        type=int,
        default=MAX_ROW_MIB,
    )
    flag(
        "--special-tokens-in-text",
        "read special tokens in the text of rows as special tokens; default: as plain text",
    )
    flag("--ignore-keys KEY,...", "unused keys anywhere to count, not to refuse", default="")
    flag("--columns OURS=THEIRS,...", "our keys for those of rows: query=question", default="")
    flag("--literal-markers", "do not count <image> and the like as text in rows without media")
    flag(
        "--multi-turn",
        "of turns that the chat template renders differently later: split (default with"
        " --packing) trains each answer as it is served; last: those behind the last question",
        choices=("split", "last"),
    )
    flag(
        "--train-template-thought",
        "train the thought without content that the chat template puts before an answer",
    )
    flag("--index-dir DIR", "where indexes of rows lie; default: beside the data", type=Path)
    flag("--valid-share X", "validate on this share of training rows, not train", type=float)
    flag(
        "--epochs N",
        "train until each row of the data has come N times, in place of --train-iters",
        type=int,
    )


def _add_layout_flags(parser: argparse.ArgumentParser) -> None:
    flag = _subject(parser, "which parameters are trained")
    flag(
        "--freeze-parameters PATTERN ...",
        "freeze the parameters whose full names match, such as 'image_encoder.*' '*norm*'",
    )
    flag(
        "--train-parameters PATTERN ...",
        "train the parameters whose full names match, even if their module is frozen",
    )
    flag = _subject(parser, "the encoder's layout")
    flag(
        "--enable-encoder-hetero-dp",
        "heterogeneous DP: the ranks of a tensor parallel group encode different microbatches",
    )
    flag(
        "--enable-full-hetero-dp",
        "full separation: all ranks encode before the decoder's schedule and after it",
    )
    flag(
        "--full-hetero-dp-schedule",
        "full separation: streamed lets encoders work where the pipeline would wait; auto"
        " (default) does so on CPU ranks where that can be done and is faster; separated does not",
        choices=SCHEDULES,
        default="auto",
    )
    flag(
        "--full-hetero-dp-encoder-speed X",
        "streamed plans count X operations of an encoder in the time of one of the decoder's"
        " (default: 1)",
        type=float,
    )
    flag(
        "--use-vit-dp-balance",
        "give the encoder's replicas images of about equal cost in each step",
    )
    flag(
        "--dp-balance-trigger-threshold-vit X",
        "do so only if the slowest replica would have 1 + X times the mean cost (default: 0.2)",
        type=float,
    )
    flag = _subject(parser, "rows on several ranks")
    flag(
        "--cp-balance",
        "with --context-parallel-size and --packing, lpt: each pack is split by its samples,"
        " so that ranks have equal work in attention; zigzag (default): all rows alike",
        choices=BALANCES,
        default="zigzag",
    )


def _add_memory_and_output_flags(parser: argparse.ArgumentParser) -> None:
    flag = _subject(parser, "memory of the host")
    away = "in host memory while the decoder works"
    flag(
        "--full-hetero-dp-cpu-offload",
        f"full separation: features and their gradients are {away}, except for two microbatches",
    )
    flag(
        "--offload-encoder-activations",
        f"full separation: what the encoder's backward needs is {away}",
    )
    flag(
        "--offload-encoder-state",
        f"full separation: the encoder's parameters, gradients and optimizer state are {away}",
    )
    flag(
        "--offload-tensors NAME ...",
        "with --fine-grained-activation-offloading: which activations of the decoder's layers are"
        " in host memory between forward and backward: " + ", ".join(NAMES),
        choices=NAMES,
    )
    flag = _subject(parser, "what a run leaves")
    flag(
        "--keep-checkpoints N",
        "keep only the newest N checkpoints and the one with the best validation loss",
        type=int,
    )
    flag(
        "--eval-generate N",
        "at each evaluation, answer the first N rows of the validation data and log how many are"
        " right",
        type=int,
    )
    flag("--metrics-json FILE", "write the run's metrics to FILE")
    flag(
        "--metrics-name NAME",
        "put them under NAME into that file, and keep what an earlier run wrote there",
    )
    flag("--trace DIR", "write the events of every rank to DIR; loongplug trace reads them")
