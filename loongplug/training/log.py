"""Our progress instead of Megatron's log lines, and Megatron's output in files."""

import contextlib
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from torch import Tensor

from loongplug.platform.replacements import ReplacementTable
from loongplug.platform.upstream_seams import training_log_table
from loongplug.training.progress import TrainingProgress


class LogTap:
    """Every iteration and evaluation that Megatron logs, to a TrainingProgress as well.

    The ``progress`` is made at the first iteration, when the parallel state is there to ask.
    """

    def __init__(
        self,
        make_progress: Callable[[], TrainingProgress],
        *,
        on_validation: Callable[[int, float], None] | None = None,
        scored: Callable[[], tuple[int, int]] | None = None,
        logged: Callable[[dict[str, float], int], None] = lambda scalars, iteration: None,
    ) -> None:
        """``on_validation`` is called with the iteration and the loss of each, on every rank.

        ``scored`` answers this replica's validation questions: how many are right, of how many;
        every rank enters. What comes of it is ``logged`` by name with the iteration.
        """
        self._make_progress = make_progress
        self._on_validation = on_validation
        self._scored = scored
        self._logged = logged
        self.progress: TrainingProgress | None = None

    @contextlib.contextmanager
    def tapped(self, *, interval: int) -> Iterator[None]:
        """Around the training loop; ``interval`` is Megatron's, from line to line."""
        table = training_log_table(
            self._on_iteration, on_evaluation=self._on_evaluation, interval=interval
        )
        with applied(table):
            try:
                yield
            finally:
                if self.progress is not None:
                    self.progress.close()

    def _on_evaluation(self, losses: dict[str, Tensor]) -> None:
        if self.progress is not None:
            answered = None if self._scored is None else self._scored()
            self.progress.evaluated(losses.get("lm loss"), answered=answered)
            match = self.progress.valid_exact_match
            if match is not None:
                self._logged({"exact match validation": match}, self.progress.iteration)
            loss = self.progress.valid_loss
            if self._on_validation is not None and loss is not None:
                self._on_validation(self.progress.iteration, loss)

    def _on_iteration(self, iteration: int, losses: dict[str, Tensor], **known: Any) -> None:
        if self.progress is None:
            self.progress = self._make_progress()
        self.progress.step(iteration, losses.get("lm loss"), **known)


@contextlib.contextmanager
def applied(table: ReplacementTable) -> Iterator[None]:
    """Inside, the replacements of ``table`` are in place."""
    table.apply()
    try:
        yield
    finally:
        table.undo()


WithoutSave = Literal["show", "drop", "log"]


@contextlib.contextmanager
def megatron_output(args: Namespace, *, without_save: WithoutSave = "show") -> Iterator[TextIO]:
    """Send what Megatron prints and logs to ``rank_<r>.log`` in :func:`log_folder`.

    Gives the stream that printing went to before. Without a folder, all of it is shown as always or
    dropped.
    """
    terminal = sys.stdout
    folder = log_folder(args, without_save=without_save)
    if folder is None and without_save == "show":
        yield terminal
        return
    path = Path(os.devnull)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{args.rank}.log"
    root = logging.getLogger()
    with path.open("a", buffering=1) as file, contextlib.redirect_stdout(file):
        handlers, root.handlers = root.handlers, [logging.StreamHandler(file)]
        try:
            yield terminal
        finally:
            root.handlers = handlers


def log_folder(args: Namespace, *, without_save: WithoutSave) -> Path | None:
    """Where ranks' logs are: beside checkpoints, else among temporary files, or nowhere.

    There is one folder for all ranks that one torchrun has started here.

    Raises:
        ValueError: it cannot be made, or is another user's.
    """
    if args.save or without_save != "log":
        return Path(args.save) / "logs" if args.save else None
    user, run = os.getuid(), os.getpid() if args.ranks == 1 else os.getppid()
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
