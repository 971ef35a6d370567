"""The checks of data flags behind the table of start-up rules; see ``checks.py``."""

import contextlib
import importlib.util
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from loongplug.data.blend import parse_blend
from loongplug.data.energon import is_energon


def data_given(args: Namespace, model: Any) -> str | None:
    """Training data are given, in one way, as files or as files with weights."""
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


def data_exists(args: Namespace, model: Any) -> str | None:
    """Every data file is there, and so is the folder of the images and videos."""
    missing = [] if args.media_root is None else [args.media_root]
    missing = [folder for folder in missing if not Path(folder).is_dir()]
    for flag, values in _data_flags(args):
        with contextlib.suppress(ValueError):  # data_given tells of those
            paths = parse_blend(values, flag=flag).paths
            missing += [str(path) for path in paths if not path.exists()]
    return f"{', '.join(missing)} not found" if missing else None


def energon_datasets(args: Namespace, model: Any) -> str | None:
    """Folders are prepared energon datasets, asked for by a flag whose package is there."""
    wanted = args.dataloader_type == "energon"
    if wanted and importlib.util.find_spec("megatron.energon") is None:
        return "--dataloader-type energon without megatron-energon"
    folders: list[Path] = []
    for flag, values in _data_flags(args):
        with contextlib.suppress(ValueError):  # data_given tells of those
            folders += [path for path in parse_blend(values, flag=flag).paths if path.is_dir()]
    if folders and not wanted:
        return f"folder {folders[0]} without --dataloader-type energon"
    bare = [str(folder) for folder in folders if not is_energon(folder)]
    return f"{', '.join(bare)} not prepared by energon" if bare else None


def video_rate(args: Namespace, model: Any) -> str | None:
    """The frames taken per second of a video are more than none."""
    rate = args.video_fps
    return None if rate is None or 0 < rate < math.inf else f"--video-fps {rate:g}"


def _data_flags(args: Namespace) -> list[tuple[str, list[str]]]:
    flags = (
        ("--data-path", args.data_path),
        ("--train-data-path", args.train_data_path),
        ("--valid-data-path", args.valid_data_path),
    )
    return [(flag, values) for flag, values in flags if values]
