"""What ranks on CPUs import: ``loongplug.parallel.launch`` forks them from a process with it."""

import atexit
import gc
import os
from multiprocessing import util

from loongplug.platform import activate
from loongplug.train import quiet

quiet()
activate("cpu")

import loongplug.training.run  # noqa: E402, F401

# A rank's garbage collections then leave alone what is imported, and do not copy its pages.
gc.freeze()


def _end_as_a_program(_: object) -> None:
    """In a forked rank: call what it registers with ``atexit`` at its end, as other programs do."""
    atexit._clear()
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)


util.register_after_fork(_end_as_a_program, _end_as_a_program)
atexit.register(os._exit, 0)  # the process that ranks are forked from ends at once
