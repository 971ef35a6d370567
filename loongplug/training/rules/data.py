"""What the data of training and of evaluation have to be, and how they are packed."""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from loongplug.data.media_files import is_remote
from loongplug.data.schemas import LEAST_FPS
from loongplug.training.rules.rule import (
    Choice,
    Problems,
    any_of,
    evaluates,
    excludes,
    flag,
    needs,
    number,
    rule,
)


@rule(
    reason="it would not be known what to train on",
    cure="give --train-data-path FILE (or FILE FILE, or WEIGHT FILE WEIGHT FILE), and "
    "--valid-data-path FILE for held-out data",
    training_only=True,
)
def data_given(args: Namespace, model: Any) -> Problems:
    """no training data, or `--data-path` beside `--train-data-path` or `--valid-data-path`"""
    if not args.data_path and not args.train_data_path:
        yield "no training data given"
    elif args.data_path and (args.train_data_path or args.valid_data_path):
        yield "--data-path given beside --train-data-path or --valid-data-path"


@rule(reason="there are no media", cure="correct the path")
def media_root(args: Namespace, model: Any) -> Problems:
    """a `--media-root` that does not exist"""
    root = args.media_root
    if root is not None and not is_remote(root) and not Path(root).is_dir():
        yield f"{root} not found"


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


validation = needs(
    any_of(number("--eval-iters", above=0), number("--eval-generate", above=0)),
    Choice(
        said=lambda args: str((evaluates(args) and args.eval_iters != 0) or ""),
        in_docs="validation data",
    ),
    reason="there would be nothing to evaluate on, and nothing to answer",
    cure="give --valid-data-path FILE or --valid-share, and no --eval-iters 0, or drop the flag",
    training_only=True,
)
valid_share = excludes(
    flag("--valid-share"),
    flag("--valid-data-path"),
    reason="validation has rows of its own, or some of the training data's",
    cure="give one of the two",
)
