"""``loongplug estimate`` of several layouts, and what it says to change where none fits."""

import json
import re

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.ways_to_fit import SECONDS, Change, flags_of, ways_to_fit

pytestmark = pytest.mark.quick

RUN = [
    *("estimate", "--ranks", "4", "--visual-tokens", "16", "--model-name", "qwen3_vl_tiny"),
    *("--training-phase", "sft", "--seq-length", "256", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "1", "--lr", "1e-3"),
]
CHANGES = [
    Change("a", "--a"),
    Change("b", "--b 2"),
    Change("b", "--b 1"),
    Change("c", "--c"),
]
SAVES = {"--a": 10, "--b 2": 5, "--b 1": 20, "--c": 30}


def told(way):
    return flags_of(way[0]), way[1]


def found(*, room, refused=(), needs=100, seconds=0.0):
    """A search among CHANGES; each estimate takes so long. What it finds, and what was asked."""
    asked = []

    def estimate(changes):
        asked.append(changes)
        if any(name in changes for name in refused):
            return None
        return needs - sum(saved for name, saved in SAVES.items() if name in changes)

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
    assert [*map(told, everything.ways)] == [("--a", 90), ("--b 2", 95), ("--b 1", 80)]
    assert len(asked) == 3  # three are enough
    some, _ = found(room=80)
    assert [*map(told, some.ways)] == [("--b 1", 80), ("--c", 70)]


def test_what_a_start_would_refuse_is_not_named():
    some, _ = found(room=80, refused=["--b 1"])
    assert [*map(told, some.ways)] == [("--c", 70)]


def test_several_changes_are_put_together_without_the_needless():
    together, asked = found(room=50)
    assert [*map(told, together.ways)] == [("--b 1 --c", 50)]
    assert "--a --b 1 --c" in asked  # the others of a kind take its place
    ways = [flags_of(changes) for changes, _ in found(room=85)[0].ways]
    assert ways == ["--a --b 2", "--b 1", "--c"]


def test_where_nothing_fits_the_least_is_told():
    nothing, _ = found(room=39)
    assert not nothing.ways
    assert told(nothing.least) == ("--a --b 1 --c", 40)
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
    assert "layout 1" in shown.stderr
    assert shown.exit_code == 1


def test_the_fullest_rank_of_all_modules_is_what_has_to_fit(tmp_path):
    figures = tmp_path / "figures.json"
    own = "model.image_encoder.rank_offset=1"
    layouts = [own, f"{own} model.image_encoder.num_layers=60"]
    options = [option for each in layouts for option in ("--layout", each)]
    options += ["--ranks", "2", "--json", str(figures)]
    result = CliRunner().invoke(app, [*RUN, *options])
    assert result.exit_code == 0, result.output
    places = re.findall(r"layout \d\W.*\W(stage 0(?: of \w+)?)\W", result.output)
    assert places == ["stage 0", "stage 0 of image_encoder"]
    small, large = json.loads(figures.read_text())["layouts"]
    assert [each["role"] for each in small["stages"]] == ["decoder", "image_encoder"]
    assert small["stages"][0] == large["stages"][0]


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
