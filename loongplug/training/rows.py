"""The rows that a run trains on, and how long their samples are."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loongplug.data.blend import Rows, open_rows
from loongplug.data.length_index import LengthSettings
from loongplug.data.pixel_limits import PixelLimits
from loongplug.data.rows import RowAccess

TRAINING = "--train-data-path"  # or Megatron's --data-path


def training_files(args: Namespace) -> Sequence[str]:
    """The files, and weights, of the rows that are trained on."""
    files: Sequence[str] = args.data_path or args.train_data_path
    return files


def rows_of(args: Namespace, files: Sequence[str], *, flag: str, split: str) -> Rows:
    """The rows of a data flag's ``files``; of energon datasets, those of the ``split``.

    Raises:
        ValueError: a file is missing or malformed.
    """
    return open_rows(files, flag=flag, seed=args.seed, split=split, access=RowAccess.of(vars(args)))


def length_settings(args: Namespace, model: Any) -> LengthSettings:
    """What the lengths of samples follow from; ``model`` is the family's config."""
    return LengthSettings(
        folder=Path(args.tokenizer_model),
        training_phase=args.training_phase,
        timestamps=model.video_style().timestamps,
        video_fps=args.video_fps,
        special_tokens_in_text=args.special_tokens_in_text,
        # The default of data index and of packs, whose remarks hold for any rule.
        multi_turn=args.multi_turn if args.packing else "split",
        pixel_limits=PixelLimits.of(vars(args)),
        access=RowAccess.of(vars(args)),
    )
