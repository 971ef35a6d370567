"""What ranks on CPUs import, once: ``loongplug.parallel.launch`` forks them from who has this."""

import atexit
import gc
import os
from multiprocessing import util

from loongplug.platform import activate
from loongplug.train import quiet

quiet()
activate("cpu")

import loongplug.training.run  # noqa: E402, F401

# What is imported stays as it is: a rank's collections need not go over it and copy its pages.
gc.freeze()


def _end_as_a_program(_: object) -> None:
    """Of a rank, once forked: what it registers with ``atexit`` is called, as in other programs."""
    atexit._clear()
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)


util.register_after_fork(_end_as_a_program, _end_as_a_program)
atexit.register(os._exit, 0)  # of the process that ranks are forked from: it has nothing to tell
