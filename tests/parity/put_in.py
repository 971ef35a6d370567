"""A pytest plugin: tests run once more under each built-in fault, which their ranks have.

What a fixture makes has none, nor has a single rank: it is what ranks are held against. Without
faults to put in, it is noted which faults' places a test's ranks come by.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from loongplug.verify import ranks
from parity import built_in
from parity.faults import PLAN, Found
from parity.mutations import FAULTS

PARAMETER = "built_in_fault"
RANKS_SECONDS = 60.0  # longer than any test of these few needs
_HERE: list[Callable[[int], None]] = []  # what the ranks of the test under way begin with


def _plan() -> dict[str, Any]:
    return json.loads(os.environ[PLAN])


def pytest_configure(config: pytest.Config) -> None:
    """Have ranks begin with a fault, and end before a test's own patience does."""
    own_process, wait = ranks._own_process, ranks._wait

    def begun(rank: int, *args: Any, **of: Any) -> None:
        own_process(rank, *args, **of)
        if int(os.environ["WORLD_SIZE"]) > 1:
            for begin in _HERE:
                begin(rank)

    def waited(*args: Any, deadline: float | None, **of: Any) -> Any:
        latest = time.monotonic() + RANKS_SECONDS
        return wait(*args, deadline=min(deadline or latest, latest), **of)

    monkeypatch = pytest.MonkeyPatch()  # for the session
    monkeypatch.setattr(ranks, "_own_process", begun)
    monkeypatch.setattr(ranks, "_wait", waited)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test under each fault that is asked for."""
    names = sorted({fault for _, fault in _plan()["cells"]})
    if names:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, names, ids=[f"under:{name}" for name in names])


def _cell(item: Any) -> tuple[str, str]:
    """A test as it is called without a fault, and the fault."""
    fault = item.callspec.params.get(PARAMETER, "") if hasattr(item, "callspec") else ""
    test = item.nodeid.removeprefix("tests/")
    for there, without in (
        (f"[under:{fault}]", ""),
        (f"[under:{fault}-", "["),
        (f"-under:{fault}", ""),
    ):
        test = test.replace(there, without)
    return test, fault


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Only the cells that are asked for, those of one test behind each other."""
    order = {(test, fault): number for number, (test, fault) in enumerate(_plan()["cells"])}
    if order:
        items[:] = sorted(
            (each for each in items if _cell(each) in order), key=lambda each: order[_cell(each)]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """While the test itself runs, its ranks begin with the fault."""
    fault = _cell(item)[1]
    reached = item.config.rootpath / _plan()["folder"] / "reached"
    if fault:
        _HERE[:] = [FAULTS[fault].put_in]
    else:
        reached.mkdir(exist_ok=True)
        for each in reached.iterdir():
            each.unlink()
        _HERE[:] = [partial(watch, folder=reached)]
    try:
        return (yield)
    finally:
        _HERE.clear()


def watch(rank: int, *, folder: Path) -> None:
    """Leave a file of a fault's name when a rank comes by one of its places."""
    instead = built_in.instead

    def noting(name: str, place: str, original: Any, _: Any, **where: Any) -> Callable[..., Any]:
        def passing(original: Any, *args: Any, **of: Any) -> Any:
            (folder / name).touch()
            return original(*args, **of)

        return instead(place, original, passing, **where)

    for name, trap in FAULTS.items():
        with patch.object(built_in, "instead", partial(noting, name)):
            trap.put_in(rank)


@pytest.hookimpl(tryfirst=True)  # the first report that is made ends the calls
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> None:
    """Keep what was found as soon as it is known."""
    if call.when != "call":
        return
    (test, fault), folder = _cell(item), item.config.rootpath / _plan()["folder"]
    how = _how(None if call.excinfo is None else call.excinfo.value)
    reached = () if fault else tuple(sorted(each.name for each in (folder / "reached").iterdir()))
    found = Found(test=test, fault=fault, how=how, seconds=round(call.duration, 2), reached=reached)
    with (folder / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write(found.line())


def _how(error: BaseException | None) -> str:
    """The word of the table for how a test ends."""
    if error is None:
        return "passes"
    if type(error).__name__ != "RankError":
        return "fails"
    said = str(error)
    return "times out" if "still ran" in said or "was stopped" in said else "ends"
