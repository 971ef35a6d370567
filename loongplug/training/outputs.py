"""Checks at the start of a run that its outputs can be written: later it would be too late."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from loongplug.checkpoint.agreement import raise_together, write_error
from loongplug.checkpoint.save_lock import save_lock
from loongplug.observe.metrics_file import read_metrics
from loongplug.parallel.failure import AtEnd, nothing_at_end

_PROBE_BYTES = 4096  # a full disk may still take a file without content


@contextmanager
def outputs_ready(args: Namespace, *, at_end: AtEnd = nothing_at_end) -> Iterator[None]:
    """Around a run: each of its outputs could be written to, and ``--save`` is no other run's.

    Each rank tries what it will write itself; rank 0 takes the lock, and leaves it also ``at_end``.
    Collective: the default group, where there is one already.

    Raises:
        ValueError: one line for each output that cannot be written to; another run has ``--save``.
    """
    with ExitStack() as held:
        error: ValueError | None = None
        try:
            if problems := unwritable(args):
                raise ValueError("\n".join(problems))
            if args.save:
                held.enter_context(save_lock(Path(args.save), rank=args.rank))
                at_end(held.close)
        except ValueError as caught:
            error = caught
        raise_together(error)
        yield


def unwritable(args: Namespace) -> list[str]:
    """A sentence for each output that this rank has to write and cannot; no collectives."""
    first, last = args.rank == 0, args.rank == args.ranks - 1
    problems = [
        _problem(flag, Path(value), rank=args.rank, kept=kept)
        for flag, value, mine, kept in (
            ("--save", args.save, True, True),
            ("--trace", args.trace, True, True),
            ("--tensorboard-dir", args.tensorboard_dir, last, True),
            ("--save-hf", args.save_hf, first, False),
            ("--save-lora", args.save_lora, first, False),
        )
        if value and mine
    ]
    if args.metrics_json and first:
        problems.append(_problem_of_metrics(Path(args.metrics_json), name=args.metrics_name))
    return [problem for problem in problems if problem is not None]


def _problem(flag: str, folder: Path, *, rank: int, kept: bool) -> str | None:
    """Why files cannot be made in ``folder``, which stays if it is ``kept``."""
    try:
        if folder.exists() and not folder.is_dir():
            return f"{flag} {folder} is a file: give a folder."
        _try(folder, rank=rank, kept=kept)
    except OSError as error:
        return str(write_error(f"{flag} {folder}", error))
    return None


def _problem_of_metrics(path: Path, *, name: str | None) -> str | None:
    try:
        if path.is_dir():
            return f"--metrics-json {path} is a folder: give a file."
        _try(path.parent, rank=0, kept=False)
        if name is not None:
            read_metrics(path)  # to which the run's will be added
    except OSError as error:
        return str(write_error(f"--metrics-json {path}", error))
    except ValueError as error:
        return f"--metrics-json: {error}"
    return None


def _try(folder: Path, *, rank: int, kept: bool) -> None:
    """Make and remove a file, and the folders that are not there and not to be kept."""
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
