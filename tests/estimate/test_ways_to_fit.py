"""``loongplug estimate`` of several layouts, and what it says to change where none fits."""

import json
import re

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.ways_to_fit import SECONDS, Change, ways_to_fit

pytestmark = pytest.mark.quick

RUN = [
    *("estimate", "--ranks", "4", "--visual-tokens", "16", "--model-name", "qwen3_vl_tiny"),
    *("--training-phase", "sft", "--seq-length", "256", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "1", "--lr", "1e-3"),
]
CHANGES = [
    Change(kind="a", flags=("--a",)),
    Change(kind="b", flags=("--b", "2")),
    Change(kind="b", flags=("--b", "1")),
    Change(kind="c", flags=("--c",)),
]
SAVES = {"--a": 10, "--b 2": 5, "--b 1": 20, "--c": 30}


def found(*, room, refused=(), needs=100, seconds=0.0):
    """A search among CHANGES; each estimate takes so long. What it finds, and what was asked."""
    asked = []

    def estimate(changes):
        named = [str(each) for each in changes]
        asked.append(" ".join(named))
        if any(name in refused for name in named):
            return None
        return needs - sum(SAVES[name] for name in named)

    ways = ways_to_fit(
        CHANGES,
        needs=needs,
        estimate=estimate,
        fits=lambda nbytes: nbytes <= room,
        clock=lambda: seconds * len(asked),
    )
    return ways, asked


def test_the_cheapest_changes_that_make_it_fit_are_named():
    everything, asked = found(room=96)
    assert [str(way) for way in everything.ways] == ["--a", "--b 2", "--b 1"]
    assert [way.needs for way in everything.ways] == [90, 95, 80]
    assert len(asked) == 3  # three are enough
    some, _ = found(room=80)
    assert [str(way) for way in some.ways] == ["--b 1", "--c"]


def test_what_a_start_would_refuse_is_not_named():
    some, _ = found(room=80, refused=["--b 1"])
    assert [str(way) for way in some.ways] == ["--c"]


def test_several_changes_are_put_together_without_the_needless():
    together, asked = found(room=50)
    (way,) = together.ways
    assert (str(way), way.needs) == ("--b 1 --c", 50)
    assert "--a --b 1 --c" in asked  # the others of a kind take its place
    assert [str(way) for way in found(room=85)[0].ways] == ["--a --b 2", "--b 1", "--c"]


def test_where_nothing_fits_the_least_is_told():
    nothing, _ = found(room=39)
    assert nothing.ways == ()
    assert (str(nothing.least), nothing.least.needs) == ("--a --b 1 --c", 40)
    assert nothing.in_time
    refused, _ = found(room=39, refused=list(SAVES))
    assert (refused.least, refused.tried) == (None, 0)


def test_no_estimate_begins_when_the_time_is_up():
    late, asked = found(room=0, seconds=SECONDS)
    assert len(asked) == 2
    assert not late.in_time


def test_a_terminal_shows_what_is_at_work():
    layout = ["--layout", "--tensor-model-parallel-size 3"]
    shown = CliRunner(env={"FORCE_COLOR": "1"}).invoke(app, [*RUN, *layout])
    assert "layout 1: flags and data" in shown.stderr
    assert shown.exit_code == 1


@pytest.mark.slow
def test_layouts_are_rows_and_what_to_change_is_estimated(tmp_path):
    """The smallest layout does not fit; with what is said to change, a run of its own does."""
    figures = tmp_path / "figures.json"
    layouts = ["", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 3"]
    options = [option for each in layouts for option in ("--layout", each)]
    room = ["--device-memory", "0.05"]
    result = CliRunner().invoke(app, [*RUN, *options, *room, "--json", str(figures)])
    assert result.exit_code == 1, result.output
    assert "layout 3 is refused: 4 ranks do not divide by tp 3" in result.output
    assert result.output.count("does not fit") == 3  # two rows and the verdict
    assert "layout 2 does not fit: " in result.output  # the smallest
    rows = json.loads(figures.read_text())["layouts"]
    assert [row["flags"] for row in rows] == layouts
    assert [len(row["stages"]) for row in rows] == [1, 2, 0]
    (first, *_) = ways = re.findall(r"layout 2 fits with (.*): [\d.]+ GB", result.output)
    assert 1 <= len(ways) <= 3
    again = [*RUN, *layouts[1].split(), *first.split(), *room]
    result = CliRunner().invoke(app, again)
    assert result.exit_code == 0, result.output
