"""Steps and cases in processes of their own.

A step is a process with a process group of its own: at its limit all of it is killed. What
computes within a step is a child of that process again, so that memory and Megatron's globals
are new in every case. On a GPU, processes are started as new ones (``spawn``): one that has touched
CUDA must not fork, and the time to import is a part of what a user waits for. On the CPU they are
forked from the driver, which has imported all of it by then and computes nothing.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gpu_steps.report import Outcome
from gpu_steps.rows import reason_of

_LAST_LINES = 12


class CaseError(Exception):
    """A case failed in its process; the text is its reason."""


def step_context(device: str) -> BaseContext:
    """How the driver starts a step's process, and that its own; on the CPU it imports first."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    importlib.import_module("gpu_steps.preload")
    return multiprocessing.get_context("fork")


def run_in_group(
    function: Callable[..., None],
    *arguments: Any,
    context: BaseContext,
    log: Path,
    limit_seconds: float,
) -> tuple[Outcome, float]:
    """Run ``function(*arguments)`` in a process group of its own; how it ended, and its seconds.

    What it and its children print goes to ``log``. None of them lives on when this returns.
    """
    began = time.monotonic()
    process = _process(context, _lead, log, function, arguments)
    process.start()
    try:
        process.join(limit_seconds)
        ended = process.exitcode is not None
    finally:  # also at Ctrl-C
        _end_group(process)
    seconds = time.monotonic() - began
    if not ended:
        return "ended at its limit", seconds
    return "done" if process.exitcode == 0 else "failed", seconds


def _process(context: BaseContext, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    made: BaseProcess = context.Process(target=function, args=arguments)  # type: ignore[attr-defined]
    return made


def _lead(log: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The life of a step's process."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # Objects of their own, for whoever started the driver may have put others in their place.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    function(*arguments)


def _end_group(process: BaseProcess) -> None:
    with suppress(ProcessLookupError):  # nobody is left
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # where it has not made its group yet
    process.join()


def last_lines(log: Path) -> list[str]:
    """The end of a step's log."""
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-_LAST_LINES:]


class Child[Result]:
    """A case under way in a child of the step's process, which may go on meanwhile."""

    def __init__(
        self, function: Callable[..., Result], options: dict[str, Any], *, device: str
    ) -> None:
        """Start ``function(**options)``; all of it can be pickled."""
        context = step_context(device)
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = _process(context, _work, sender, function, options)
        self._process.start()
        sender.close()

    def result(self) -> Result:
        """What the function gave, once its process has ended. Raises CaseError."""
        try:
            failed, result = self._receiver.recv()
        except EOFError:
            self._process.join()
            raise CaseError(
                f"its process ended with exit code {self._process.exitcode}; the log says more"
            ) from None
        self._process.join()
        if failed:
            raise CaseError(result)
        found: Result = result
        return found


def _work(
    sender: "Connection[Any, Any]", function: Callable[..., Any], options: dict[str, Any]
) -> None:
    """The life of a case's process."""
    try:
        answer = (False, function(**options))
    except Exception as error:
        traceback.print_exc()
        answer = (True, reason_of(error))
    sender.send(answer)
