"""Tables that are piped, and progress bars of commands that fork ranks."""

import threading
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from loongplug.consoles import table_console, threadless_bars

pytestmark = pytest.mark.quick


def test_a_table_is_not_cut_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"a_long_column_{number}" for number in range(30)]
    table = Table("rank", *names)
    for stderr in (False, True):
        table_console(stderr=stderr).print(table)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(name in text for name in names)


def test_a_terminal_is_as_wide_as_it_is(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "50")
    assert (table_console().width, table_console(least=132).width) == (50, 132)


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
