"""Bars for commands that fork."""

import threading
from io import StringIO

import pytest
from rich.console import Console
from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from loongplug.observe.bars import threadless_bars

pytestmark = pytest.mark.quick


def test_bars_are_drawn_without_a_thread():
    out = StringIO()
    threads = set(threading.enumerate())
    with threadless_bars(Console(file=out, force_terminal=True, width=80)) as bars:
        task = bars.add_task("cells", total=3)
        assert set(threading.enumerate()) <= threads
        bars.advance(task)
        assert "1/3" not in out.getvalue()
        bars.refresh()
        assert "1/3" in out.getvalue()


def test_nothing_is_drawn_where_there_is_no_terminal():
    out = StringIO()
    with threadless_bars(Console(file=out)) as bars:
        bars.advance(bars.add_task("cells", total=3))
        bars.refresh()
    assert out.getvalue().strip() == ""


@pytest.mark.parametrize(
    ("estimates", "clock"), [(False, TimeElapsedColumn), (True, TimeRemainingColumn)]
)
def test_the_clock(estimates, clock):
    assert isinstance(threadless_bars(estimates=estimates).columns[-1], clock)
