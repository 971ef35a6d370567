"""Our progress in the place of Megatron's log lines, and Megatron's output in files."""

import contextlib
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

from torch import Tensor

from loongplug.platform.upstream_seams import training_log_table
from loongplug.training.progress import StepReport, TrainingProgress


class LogTap:
    """While entered, every iteration that Megatron logs goes to a TrainingProgress as well.

    The progress is made at the first iteration, when the parallel state is there to ask.
    """

    def __init__(self, make_progress: Callable[[], TrainingProgress], *, interval: int) -> None:
        """``interval`` is Megatron's, from line to line."""
        self._make_progress = make_progress
        self._progress: TrainingProgress | None = None
        self._table = training_log_table(
            self._on_iteration, on_evaluation=self._on_evaluation, interval=interval
        )

    def __enter__(self) -> "LogTap":
        self._table.apply()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._table.undo()
        if self._progress is not None:
            self._progress.close()

    @property
    def reports(self) -> list[StepReport]:
        """All reports so far, oldest first."""
        return [] if self._progress is None else self._progress.reports

    @property
    def valid_loss(self) -> float | None:
        """The last evaluation's loss, None where there was none."""
        return None if self._progress is None else self._progress.valid_loss

    @property
    def bad_samples(self) -> dict[str, int]:
        """Samples that were left out, of all ranks, by kind."""
        return {} if self._progress is None else self._progress.bad_samples

    def _on_evaluation(self, losses: dict[str, Tensor]) -> None:
        if self._progress is not None:
            self._progress.evaluated(losses.get("lm loss"))

    def _on_iteration(self, iteration: int, losses: dict[str, Tensor]) -> None:
        if self._progress is None:
            self._progress = self._make_progress()
        self._progress.step(iteration, losses.get("lm loss"))


WithoutSave = Literal["show", "drop", "log"]


@contextlib.contextmanager
def megatron_output(args: Namespace, *, without_save: WithoutSave = "show") -> Iterator[TextIO]:
    """Send what Megatron prints and logs to ``<save>/logs/rank_<r>.log``.

    Gives the stream that printing went to before. Without ``--save`` all of it is shown as always,
    dropped, or goes to logs in the folder for temporary files.
    """
    terminal = sys.stdout
    if not args.save and without_save == "show":
        yield terminal
        return
    path = Path(os.devnull)
    if args.save or without_save == "log":
        folder = Path(args.save) / "logs" if args.save else _temporary_logs(args.world_size)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{args.rank}.log"
        if args.rank == 0:
            print(f"Megatron's own log of each rank: {folder}", flush=True)
    root = logging.getLogger()
    with path.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        handlers, root.handlers = root.handlers, [logging.StreamHandler(file)]
        try:
            yield terminal
        finally:
            root.handlers = handlers


def _temporary_logs(world_size: int) -> Path:
    """A folder in that for temporary files, one for all ranks that one torchrun has started here.

    Raises:
        ValueError: it cannot be made, or is another user's.
    """
    user, run = os.getuid(), os.getpid() if world_size == 1 else os.getppid()
    folder = Path(tempfile.gettempdir()) / f"loongplug-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != user:
            raise OSError("it is another user's, or a link")
    except OSError as error:
        raise ValueError(
            f"Megatron's log cannot be in {folder} ({error}); give --save DIR, whose logs it is "
            "among, or another TMPDIR."
        ) from error
    return folder / str(run)
