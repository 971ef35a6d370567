"""What a run's data have to be, and how they are packed."""

import contextlib
import importlib.util
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from loongplug.data.arrow_rows import is_arrow
from loongplug.data.blend import parse_blend
from loongplug.data.energon import is_energon
from loongplug.data.media_files import is_remote
from loongplug.data.schemas import LEAST_FPS
from loongplug.training.rules.rule import rule, value_of


@rule(
    reason="it would not be known what to train on",
    cure="give --train-data-path FILE (or FILE FILE, or WEIGHT FILE WEIGHT FILE), and "
    "--valid-data-path FILE for held-out data",
    training_only=True,
)
def data_given(args: Namespace, model: Any) -> str | None:
    """no training data, `--data-path` beside `--train-data-path` or `--valid-data-path`, or
    weights (`w1 p1 w2 p2`) that are not above 0 or not given for every file
    """
    if not args.data_path and not args.train_data_path:
        return "no training data given"
    if args.data_path and (args.train_data_path or args.valid_data_path):
        return "--data-path given beside --train-data-path or --valid-data-path"
    for flag, values in _data_flags(args):
        try:
            parse_blend(values, flag=flag)
        except ValueError as error:
            return str(error).rstrip(".")
    return None


@rule(reason="there is nothing to read", cure="correct the path")
def data_exists(args: Namespace, model: Any) -> str | None:
    """a data path or a `--media-root` that does not exist"""
    missing = [] if args.media_root is None else [args.media_root]
    missing = [each for each in missing if not is_remote(each) and not Path(each).is_dir()]
    for flag, values in _data_flags(args):
        with contextlib.suppress(ValueError):  # data_given tells of those
            paths = parse_blend(values, flag=flag).paths
            # Of files on object stores it is known once they are opened.
            missing += [str(path) for path in paths if isinstance(path, Path) and not path.exists()]
    return f"{', '.join(missing)} not found" if missing else None


@rule(
    reason="that package reads such datasets' lists, and other folders are no data",
    cure="pip install 'loongplug[energon]', run energon prepare, and give "
    "--dataloader-type energon; or name a JSONL file, or a folder of Parquet files",
    training_only=True,
)
def energon(args: Namespace, model: Any) -> str | None:
    """`--dataloader-type energon` without the package megatron-energon; a folder as data path, but
    for Parquet files and saved datasets, without that flag or without what `energon prepare` writes
    """
    wanted = args.dataloader_type == "energon"
    if wanted and importlib.util.find_spec("megatron.energon") is None:
        return "--dataloader-type energon without megatron-energon"
    folders: list[Path] = []
    for flag, values in _data_flags(args):
        with contextlib.suppress(ValueError):  # data_given tells of those
            paths = parse_blend(values, flag=flag).paths
            folders += [path for path in paths if isinstance(path, Path) and _is_other_folder(path)]
    if folders and not wanted:
        return f"folder {folders[0]} without --dataloader-type energon"
    bare = [str(folder) for folder in folders if not is_energon(folder)]
    return f"{', '.join(bare)} not prepared by energon" if bare else None


def _is_other_folder(path: Path) -> bool:
    return path.is_dir() and not is_arrow(path)


@rule(
    refuses=f"`--video-fps` below {LEAST_FPS:g}",
    reason="it is the number of frames taken per second of a video, and slower ones have times "
    "beyond what positions can count",
    cure=f"give {LEAST_FPS:g} or more",
    training_only=True,
)
def video_rate(args: Namespace, model: Any) -> str | None:
    rate = args.video_fps
    if rate is None or not math.isfinite(rate):  # another rule asks for finite numbers
        return None
    return None if rate >= LEAST_FPS else f"--video-fps {rate:g}"


@rule(
    reason="a pack is a microbatch of several samples already",
    cure="use --micro-batch-size 1, and a longer --seq-length for more samples at once",
)
def packing_rows(args: Namespace, model: Any) -> str | None:
    """`--packing` with a `--micro-batch-size` or `--eval-micro-batch-size` above 1"""
    if not args.packing:
        return None
    flags = ("--micro-batch-size", "--eval-micro-batch-size")
    wrong = [f"{flag} {size}" for flag in flags if (size := value_of(args, flag)) not in (None, 1)]
    return f"--packing with {' and '.join(wrong)}" if wrong else None


@rule(
    reason="the renderings of a row are segments of a pack",
    cure="add --packing, or drop the flag: the answers behind each row's last question are trained",
)
def split_rows(args: Namespace, model: Any) -> str | None:
    """`--multi-turn split` without `--packing`"""
    wrong = args.multi_turn == "split" and not args.packing
    return "--multi-turn split without --packing" if wrong else None


@rule(reason="LoongPlug loads samples and the tokenizer itself", cure="drop the flag")
def data_loading(args: Namespace, model: Any) -> str | None:
    """a `--dataloader-type` other than `external` and `energon`, a `--tokenizer-type` other than
    `HuggingFaceTokenizer`
    """
    if args.dataloader_type not in ("external", "energon"):
        return f"--dataloader-type {args.dataloader_type}"
    if args.tokenizer_type not in (None, "HuggingFaceTokenizer"):
        return f"--tokenizer-type {args.tokenizer_type}"
    return None


def _data_flags(args: Namespace) -> list[tuple[str, list[str]]]:
    flags = ("--data-path", "--train-data-path", "--valid-data-path")
    return [(flag, values) for flag in flags if (values := value_of(args, flag))]
