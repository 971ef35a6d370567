"""What the data of training and of evaluation have to be, and how they are packed."""

import contextlib
import importlib.util
import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loongplug.data.arrow_rows import is_arrow
from loongplug.data.blend import parse_blend
from loongplug.data.energon import is_energon
from loongplug.data.media_files import is_remote
from loongplug.data.schemas import LEAST_FPS
from loongplug.training.rules.rule import (
    Problems,
    any_of,
    evaluates,
    excludes,
    flag,
    needs,
    number,
    one_of,
    rule,
    value_of,
)


@rule(
    reason="it would not be known what to train on",
    cure="give --train-data-path FILE (or FILE FILE, or WEIGHT FILE WEIGHT FILE), and "
    "--valid-data-path FILE for held-out data",
    training_only=True,
)
def data_given(args: Namespace, model: Any) -> Problems:
    """no training data, `--data-path` beside `--train-data-path` or `--valid-data-path`, or
    weights (`w1 p1 w2 p2`) that are not above 0 or not given for every file
    """
    if not args.data_path and not args.train_data_path:
        yield "no training data given"
    elif args.data_path and (args.train_data_path or args.valid_data_path):
        yield "--data-path given beside --train-data-path or --valid-data-path"
    for name, values in _data_flags(args):
        try:
            parse_blend(values, flag=name)
        except ValueError as error:
            yield str(error).rstrip(".")


@rule(reason="there is nothing to read", cure="correct the path")
def data_exists(args: Namespace, model: Any) -> Problems:
    """a data path or a `--media-root` that does not exist"""
    root = args.media_root
    missing = [] if root is None or is_remote(root) or Path(root).is_dir() else [root]
    missing += [str(path) for path in _data_paths(args) if not path.exists()]
    if missing:
        yield f"{', '.join(missing)} not found"


@rule(
    reason="that package reads such datasets' lists, and other folders are no data",
    cure="pip install 'loongplug[energon]', run energon prepare, and give "
    "--dataloader-type energon; or name a JSONL file, or a folder of Parquet files",
    training_only=True,
)
def energon(args: Namespace, model: Any) -> Problems:
    """`--dataloader-type energon` without the package megatron-energon; a folder as data path, but
    for Parquet files and saved datasets, without that flag or without what `energon prepare` writes
    """
    folders = [path for path in _data_paths(args) if path.is_dir() and not is_arrow(path)]
    wanted = args.dataloader_type == "energon"
    if wanted and importlib.util.find_spec("megatron.energon") is None:
        yield "--dataloader-type energon without megatron-energon"
    elif folders and not wanted:
        yield f"folder {folders[0]} without --dataloader-type energon"
    elif bare := [str(folder) for folder in folders if not is_energon(folder)]:
        yield f"{', '.join(bare)} not prepared by energon"


def _data_paths(args: Namespace) -> Iterator[Path]:
    """Files and folders; of those on object stores it is known once they are opened."""
    for name, values in _data_flags(args):
        with contextlib.suppress(ValueError):  # data_given tells of those
            paths = parse_blend(values, flag=name).paths
            yield from (path for path in paths if isinstance(path, Path))


def _data_flags(args: Namespace) -> list[tuple[str, list[str]]]:
    names = ("--data-path", "--train-data-path", "--valid-data-path")
    return [(name, values) for name in names if (values := value_of(args, name))]


@rule(
    refuses=f"`--video-fps` below {LEAST_FPS:g}",
    reason="it is the number of frames taken per second of a video, and slower ones have times "
    "beyond what positions can count",
    cure=f"give {LEAST_FPS:g} or more",
    training_only=True,
)
def video_rate(args: Namespace, model: Any) -> Problems:
    rate = args.video_fps
    if rate is not None and math.isfinite(rate) and rate < LEAST_FPS:
        yield f"--video-fps {rate:g}"


packing_rows = excludes(
    flag("--packing"),
    any_of(
        number("--micro-batch-size", above=1),
        number("--eval-micro-batch-size", above=1),
        joined=" and ",
    ),
    reason="a pack is a microbatch of several samples already",
    cure="use --micro-batch-size 1, and a longer --seq-length for more samples at once",
)
split_rows = needs(
    flag("--multi-turn split"),
    flag("--packing"),
    reason="the renderings of a row are segments of a pack",
    cure="add --packing, or drop the flag: the answers behind each row's last question are trained",
)


data_loading = one_of(
    "--dataloader-type",
    ("external", "energon"),
    reason="LoongPlug loads samples itself",
    cure="drop the flag",
)
tokenizer_type = one_of(
    "--tokenizer-type",
    ("HuggingFaceTokenizer",),
    reason="LoongPlug loads the tokenizer itself",
    cure="drop the flag",
)


@rule(
    reason="there would be nothing to evaluate on",
    cure="give --valid-data-path FILE or --valid-share, or drop --eval-iters",
    training_only=True,
)
def evaluation(args: Namespace, model: Any) -> Problems:
    """`--eval-iters` without `--valid-data-path` or `--valid-share`, or below 0"""
    steps = args.eval_iters or 0
    if steps < 0:
        yield f"--eval-iters {steps}"
    elif steps and not evaluates(args):
        yield f"--eval-iters {steps} without validation data"


valid_share = excludes(
    flag("--valid-share"),
    flag("--valid-data-path"),
    reason="validation has rows of its own, or some of the training data's",
    cure="give one of the two",
)


@rule(
    reason="the rows are those of the validation data, and are answered when it is evaluated",
    cure="give 1 or more with validation data and without --eval-iters 0, or drop the flag",
    training_only=True,
)
def eval_generate(args: Namespace, model: Any) -> Problems:
    """`--eval-generate` below 1, without validation data, or with `--eval-iters 0`"""
    count = args.eval_generate
    if count is None:
        return
    if not evaluates(args):
        yield f"--eval-generate {count} without validation data"
    elif args.eval_iters == 0:
        yield f"--eval-generate {count} with --eval-iters 0"
    elif count < 1:
        yield f"--eval-generate {count}"
