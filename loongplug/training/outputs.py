"""Checks at the start of a run that its outputs can be written: later it would be too late."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

from loongplug.checkpoint.common_errors import raise_together, write_error
from loongplug.checkpoint.save_lock import save_lock
from loongplug.observe.trace_file import RANK_TRACE, rank_file
from loongplug.output_files import check_output, figures, is_stream
from loongplug.parallel.failure import AtEnd, nothing_at_end
from loongplug.training.checkpoints import refuse_others_checkpoints
from loongplug.training.rules.folders import READ
from loongplug.training.rules.rule import value_of

_PROBE_BYTES = 4096  # a full disk may still take a file without content


@contextmanager
def outputs_ready(args: Namespace, *, at_end: AtEnd = nothing_at_end) -> Iterator[None]:
    """Around a run: each of its outputs could be written to, and is no other run's.

    Each rank tries what it will write itself; rank 0 takes the locks of ``--save`` and ``--trace``,
    and leaves them also ``at_end``. ValueError has a line for each output that cannot be written.
    Collective: the default group, where there is one already.
    """
    with ExitStack() as held:
        error: ValueError | None = None
        try:
            if problems := unwritable(args):
                raise ValueError("\n".join(problems))
            for folder in {os.path.realpath(each) for each in (args.trace, args.save) if each}:
                held.enter_context(save_lock(Path(folder), rank=args.rank))
            at_end(held.close)
            if args.save and args.rank == 0:
                refuse_others_checkpoints(args)
        except ValueError as caught:
            error = caught
        raise_together(error)
        yield


def unwritable(args: Namespace) -> list[str]:
    """A sentence for each output that this rank has to write and cannot; no collectives."""
    first, last = args.rank == 0, args.rank == args.ranks - 1
    metrics = Path(args.metrics_json) if args.metrics_json and first else None
    problems = [
        _problem(flag, Path(place), rank=args.rank, kept=kept)
        for flag, place, mine, kept in (
            ("--save", args.save, True, True),
            ("--trace", args.trace, True, True),
            ("--tensorboard-dir", args.tensorboard_dir, last, True),
            ("--save-hf", args.save_hf, first, False),
            ("--save-lora", args.save_lora, first, False),
            ("--metrics-json", metrics, metrics and not is_stream(metrics), False),
        )
        if place and mine
    ]
    if found := [problem for problem in problems if problem is not None]:
        return found
    given = [value_of(args, flag) or () for flag in READ]
    read = chain(*(value if isinstance(value, list) else [value] for value in given))
    flag = "--metrics-json"
    try:
        check_output(metrics, figures("metrics"), inputs=map(str, read))
        flag = "--trace"
        check_output(rank_file(Path(args.trace), args.rank) if args.trace else None, RANK_TRACE)
    except ValueError as error:
        return [f"{flag} {error}"]
    return []


def _problem(flag: str, place: Path, *, rank: int, kept: bool) -> str | None:
    """Why files cannot be made in a folder that is ``kept``, or around what appears by a rename."""
    folder = place if kept else Path(os.path.realpath(place)).parent
    try:
        if folder.exists() and not folder.is_dir():
            return f"{flag} {folder} is a file: give a folder."
        _try(folder, rank=rank, kept=kept)
    except OSError as error:
        return str(write_error(f"{flag} {place}", error))
    return None


def _try(folder: Path, *, rank: int, kept: bool) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".loongplug_probe_{rank}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
        if not kept:
            with suppress(OSError):
                for path in missing:
                    path.rmdir()
