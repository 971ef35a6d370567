"""Tables that are piped."""

import pytest
from rich.table import Table

from loongplug.consoles import table_console

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
    assert table_console().width == 50
    assert table_console(least=132).width == 132
