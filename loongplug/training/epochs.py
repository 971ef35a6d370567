"""The number of iterations that ``--epochs`` means, for Megatron's loop and its rates."""

from argparse import Namespace
from typing import Any

from loongplug.data.blend import sources_of
from loongplug.data.extent_index import IndexedExtents, command_for
from loongplug.data.kept_files import said_by
from loongplug.data.row_plan import Packing, packs_of_epochs
from loongplug.data.step_sizes import StepSizes
from loongplug.training.rows import survey_settings, training_rows
from loongplug.training.rules.rule import data_parallel_size
from loongplug.training.step_sizes import step_sizes


def iterations_of_epochs(args: Namespace, model: Any) -> int:
    """How many iterations take every row of the training data ``--epochs`` times.

    The last one is filled up with rows of the next epoch. Follows from the data and the flags
    alone, so that a run that resumes ends where it would have ended. ``model`` is the family's
    config. No collectives.

    Raises:
        ValueError: a file is missing or malformed; with packing, a file has no index of lengths,
            or one that does not fit.
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
