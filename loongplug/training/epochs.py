"""The number of iterations that ``--epochs`` means, for Megatron's loop and its rates."""

from argparse import Namespace
from typing import Any

from loongplug.data.blend import sources_of
from loongplug.data.kept_files import said_by
from loongplug.data.length_index import indexed_sizes, sample_lengths
from loongplug.data.planned_packs import packs_of_epochs
from loongplug.data.step_sizes import StepSizes
from loongplug.training.rows import length_settings, training_rows
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
        settings = length_settings(args, model)
        lengths = sample_lengths(rows, indexed_sizes(rows, settings), seq_length=args.seq_length)
        if lengths is None:
            commands = "` and `".join(settings.command(source) for source in sources_of(rows))
            raise ValueError(
                f"--epochs {args.epochs} with --packing counts packs, which follow from the lengths"
                f" of the samples: index them with `{commands}`, or give --train-iters."
            )
        taken = packs_of_epochs(
            lengths,
            seed=args.seed,
            seq_length=args.seq_length,
            look_ahead=args.packing_look_ahead,
            epochs=args.epochs,
        )
    each = args.micro_batch_size * data_parallel_size(args)
    sizes = step_sizes(args) or StepSizes.constant(each)  # which is Megatron's own default
    return sizes.steps(taken, each=each)
