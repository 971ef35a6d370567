"""Tests in processes of their own: torch's autograd counts devices once, at its first backward.

Where a test before has run a backward, a device that comes later has no thread for its own. So the
tests of the stand-in are forked from a server that has imported everything and computed nothing.
"""

import importlib
import multiprocessing
import os
import sys
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

_SERVER = multiprocessing.get_context("forkserver")


def call(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call a module's function there. Raises AssertionError with the error that it raised."""
    _start_server()
    here, there = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(target=_called, args=(there, module, name, arguments))
    process.start()
    there.close()
    try:
        error = here.recv()
    except EOFError:
        error = "the test's process ended without a word"
    except BaseException:  # the test's time is over
        process.kill()
        raise
    finally:
        process.join()
        here.close()
    if error:
        raise AssertionError(error)


def _start_server() -> None:
    """Once. The server passes over what it cannot import, and does not take this one's paths."""
    _SERVER.set_forkserver_preload(["conftest"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()


def _called(there: Connection, module: str, name: str, arguments: dict[str, Any]) -> None:
    try:
        assert "conftest" in sys.modules, "the server has not imported it"
        getattr(importlib.import_module(module), name)(**arguments)
        there.send("")
    except BaseException:
        there.send(traceback.format_exc())
