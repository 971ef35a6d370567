"""The rows that a run trains on, how long their samples are, and how many iterations take them."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.data.blend import Rows, open_rows, sources_of
from loongplug.data.cache_folder import said_by
from loongplug.data.data_options import RowAccess
from loongplug.data.extent_index import IndexedExtents, command_for
from loongplug.data.sample_order import Packing, StepSizes, packs_of_epochs
from loongplug.data.survey_settings import SurveySettings
from loongplug.training.rules.rule import data_parallel_size, evaluates
from loongplug.training.step_sizes import step_sizes

TRAINING = "--train-data-path"  # or Megatron's --data-path


def training_files(args: Namespace) -> Sequence[str]:
    """The files, and weights, of the rows that are trained on."""
    files: Sequence[str] = args.data_path or args.train_data_path
    return files


def training_rows(args: Namespace, *, valid: bool = False) -> Rows:
    """The rows that are trained on or, if ``valid``, those that ``--valid-share`` takes of them."""
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


def iterations_of_epochs(args: Namespace, model: Any) -> int:
    """How many iterations take every row of the training data ``--epochs`` times.

    The last one is filled up with rows of the next epoch. Follows from the data and the flags
    alone, so that a run that resumes ends where it would have ended. With packing, files need an
    index of lengths. No collectives.
    """
    with said_by(args.rank == 0):
        rows = training_rows(args)
    taken = args.epochs * len(rows)
    if args.packing:
        settings = survey_settings(args, model)
        extents = IndexedExtents.of(rows, settings)
        if extents is None:
            commands = "` and `".join(command_for(each, settings) for each in sources_of(rows))
            raise ValueError(
                f"--epochs {args.epochs} with --packing counts packs, which follow from the lengths"
                f" of the samples: index them with `{commands}`, or give --train-iters."
            )
        taken = packs_of_epochs(
            extents.lengths(seq_length=args.seq_length),
            seed=args.seed,
            packing=Packing(seq_length=args.seq_length, look_ahead=args.packing_look_ahead),
            epochs=args.epochs,
        )
    each = args.micro_batch_size * data_parallel_size(args)
    sizes = step_sizes(args) or StepSizes.constant(each)  # which is Megatron's own default
    return sizes.steps(taken, each=each)
