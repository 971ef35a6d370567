"""Built-in faults can be put in, and a table says which test finds which."""

from unittest.mock import patch

import pytest
from ranks import run_ranks

from parity import built_in, put_in
from parity.faults import TESTS, Found, found_by, idle, known, page, read_cover
from parity.mutations import FAULTS

pytestmark = pytest.mark.quick


def put_in_all(rank: int, *, folder) -> dict[str, list[str]]:
    """The places of each fault, which is put in."""
    places: dict[str, list[str]] = {}
    instead = built_in.instead
    for name, trap in FAULTS.items():

        def noted(place, *args, name=name, **where):
            places.setdefault(name, []).append(place)
            return instead(place, *args, **where)

        with patch.object(built_in, "instead", noted):
            trap.put_in(rank)
    put_in.watch(rank, folder=folder)
    return places


def test_every_fault_has_a_place_that_there_is(tmp_path):
    (places,) = run_ranks(put_in_all, 1, folder=tmp_path)
    assert places.keys() == FAULTS.keys()
    assert not any(tmp_path.iterdir())  # nothing has run
    assert len({trap.trap for trap in FAULTS.values()}) == len(FAULTS)


def test_the_tests_of_the_cover_are_there_and_run_every_time(request):
    """None is left to --all. Sees those that are run along with this one."""
    cover = read_cover()
    assert len(cover) > 10
    for test, kept_for in cover.items():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS / path).read_text(), test
        assert kept_for, test
    items = {item.nodeid.removeprefix("tests/"): item for item in request.session.items}
    assert not [test for test in cover if test in items and "sweep" in items[test].keywords]
    files = {name.partition("::")[0] for name in items}
    if all(test.partition("::")[0] in files for test in cover) and len(items) > 1000:
        assert cover.keys() <= items.keys()  # a renamed case would leave the cover without a word


def test_the_page_tells_what_was_found_and_what_was_not_run(tmp_path):
    (one, other, *_), (first, second, *_) = read_cover(), FAULTS
    lines = [
        Found(test=one, fault="", how="passes", seconds=2.0, reached=(first, second)),
        Found(test=one, fault=first, how="fails", seconds=2.0),
        Found(test=one, fault=second, how="passes", seconds=2.0),
        Found(test=other, fault="", how="passes", seconds=1.0),
    ]
    (tmp_path / "cells.jsonl").write_text("".join(each.line() for each in lines))
    results = known(tmp_path)
    assert found_by(results, [one, other]) == {one: {first}, other: set()}
    assert idle({one: {first}, other: {first, second}, "third": {second, "x"}}) == [one, other]
    text = [*page(results, read_cover())]
    rows = {line.split("`")[1]: line for line in text if line[:3] == "| `"}
    cells = {name: line.split(" | ")[3:6] for name, line in rows.items()}
    assert cells[first] == ["fails", "", "?"]
    assert cells[second] == [".", "", "?"]
    assert f"| 1 | `{one}` | 2.0 | 1 | {read_cover()[one]} |" in text
    assert f"| 2 | `{other}` | 1.0 | 0 | {read_cover()[other]} |" in text
