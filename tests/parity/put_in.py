"""A pytest plugin: every run of several ranks has the fault that the environment names."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loongplug.verify import ranks
from parity.faults import FAULT, TESTS


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Once tests are there, so is all that a fault changes: each rank changes it when it begins."""
    module, name = os.environ[FAULT].split(":")
    sys.path.append(str(Path(TESTS, *module.split(".")).parent))
    put_in: Callable[[int], None] = getattr(importlib.import_module(module.split(".")[-1]), name)
    own_process = ranks._own_process

    def with_fault(rank: int, *args: Any, **kwargs: Any) -> None:
        own_process(rank, *args, **kwargs)
        if int(os.environ["WORLD_SIZE"]) > 1:
            put_in(rank)

    monkeypatch = pytest.MonkeyPatch()  # for the session: nothing runs without the fault
    monkeypatch.setattr(ranks, "_own_process", with_fault)
