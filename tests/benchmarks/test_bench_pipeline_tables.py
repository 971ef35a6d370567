"""Tables with stages that sleep: settings of equal work on equally many ranks."""

import csv
from functools import cache
from pathlib import Path

import pytest
from bench import bench
from micro.pipeline_tables import SETTINGS, TABLES, Setting
from modes.pipeline_clock import predicted
from modes.pipeline_work import Case
from typer.testing import CliRunner

pytestmark = pytest.mark.quick

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "which_mode.csv"


@cache
def cases_of(setting: Setting) -> dict[str, Case]:
    return setting.cases()


def work(case: Case) -> float:
    """Milliseconds of all ranks for a microbatch."""
    decoder = sum(each.forward + each.backward for each in case.stages) * case.tp
    return decoder + sum(each.time.forward + each.time.backward for each in case.encoders)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_modes_have_work_in_one_proportion_on_as_many_ranks(setting):
    cases = cases_of(setting)
    assert len(cases) == 6
    for case in cases.values():
        assert case.ranks == 2 * setting.pp
        assert case.microbatches == setting.microbatches
        (encoder,) = case.encoders
        both = encoder.time.forward + encoder.time.backward
        assert both / work(case) == pytest.approx(setting.share)
        assert predicted(case) == pytest.approx(400 * case.microbatches)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_streamed_is_nowhere_slower_than_separated(setting):
    """By the clock: in as long a step of the table, there is more work."""
    cases = cases_of(setting)
    assert work(cases["streamed"]) > work(cases["full_hetero_dp"])


def test_what_is_chosen_is_the_best_by_the_clock():
    cases = Setting(pp=4, microbatches=32, share=0.3).cases()
    first, second, *_ = cases["uniform tuned"].stages
    assert first.forward < 0.5 * second.forward
    (encoder,) = cases["own_ranks"].encoders
    assert (encoder.replicas, len(cases["own_ranks"].stages)) == (2, 3)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_docs_show_what_the_clock_says(setting):
    """A figure over what it is of the clock's, both with two decimals.

    Streamed was measured with plans that were up to 2 % longer or shorter than today's.
    """
    place = (str(setting.pp), str(setting.microbatches), f"{setting.share:.0%}")
    rows = csv.DictReader(FIGURES.read_text(encoding="utf-8").splitlines())
    found = {
        row["mode"]: float(row["step"]) / float(row["over_clock"])
        for row in rows
        if (row["stages"], row["microbatches"], row["encoder"]) == place
    }
    cases = cases_of(setting)
    assert list(found) == list(cases)
    for name, case in cases.items():
        said = predicted(case) * case.ranks / (work(case) * case.microbatches)
        assert found[name] == pytest.approx(said, rel=0.02 if name == "streamed" else 0.012)


def test_a_table_that_is_not_there_is_one_sentence():
    found = CliRunner().invoke(bench, ["pipeline-tables", "table-9"])
    assert found.exit_code == 1
    assert f"expected one of {', '.join(TABLES)}." in found.output
