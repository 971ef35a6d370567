"""Megatron's output in files, and replacements of its functions for a while."""

import contextlib
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

from loongplug.platform.replacements import ReplacementTable


@contextlib.contextmanager
def applied(table: ReplacementTable) -> Iterator[None]:
    table.apply()
    try:
        yield
    finally:
        table.undo()


WithoutSave = Literal["show", "drop", "log"]


@contextlib.contextmanager
def megatron_output(args: Namespace, *, without_save: WithoutSave = "show") -> Iterator[TextIO]:
    """Send what Megatron prints and logs to a file in :func:`log_folder`; gives the old stdout."""
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
