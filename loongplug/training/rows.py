"""The rows that a run trains on, and how long their samples are."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.data.blend import Rows, open_rows
from loongplug.data.rows import RowAccess
from loongplug.data.survey import SurveySettings
from loongplug.training.rules.rule import evaluates

TRAINING = "--train-data-path"  # or Megatron's --data-path


def training_files(args: Namespace) -> Sequence[str]:
    """The files, and weights, of the rows that are trained on."""
    files: Sequence[str] = args.data_path or args.train_data_path
    return files


def training_rows(args: Namespace, *, valid: bool = False) -> Rows:
    """The rows that are trained on or, if ``valid``, those that ``--valid-share`` takes of them.

    ValueError for a file that is missing or malformed, or where one of the two has no row.
    """
    how = {"split": "train", "valid_share": args.valid_share, "valid": valid}
    return _opened(args, training_files(args), flag=TRAINING, **how)


def validation_rows(args: Namespace) -> Rows | None:
    """The rows that are evaluated, if any; ValueError as of :func:`training_rows`."""
    if args.eval_iters == 0 or not evaluates(args):
        return None
    if args.valid_share is not None:
        return training_rows(args, valid=True)
    return _opened(args, args.valid_data_path, flag="--valid-data-path", split="val")


def _opened(args: Namespace, files: Sequence[str], **how: Any) -> Rows:
    return open_rows(files, seed=args.seed, access=RowAccess.of(vars(args)), **how)


def survey_settings(args: Namespace, model: Any) -> SurveySettings:
    """What rows become, as an index has it; ``model`` is the family's config."""
    return SurveySettings.of(vars(args), timestamps=model.video_style().timestamps)
