"""Built-in faults can be put in, and the page says which test finds which."""

import json
from unittest.mock import patch

import pytest
from ranks import run_ranks

from parity import built_in, put_in
from parity.faults import CORE, TESTS, Found, by_test, cover, known, page, read_cover
from parity.mutations import FAULTS
from parity.not_built_in import NOT_HERE

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


def test_every_fault_tells_its_trap_and_who_tells_of_it():
    assert len({trap.trap for trap in FAULTS.values()}) == len(FAULTS)
    for trap in FAULTS.values():
        assert trap.spec.partition(".md")[1], trap
    assert len({trap for trap, _, _ in NOT_HERE}) == len(NOT_HERE)


def test_the_tests_are_there():
    for test in CORE:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS / path).read_text()


def test_the_cover_is_run_every_time(request):
    """None of its tests is left to --all. Sees those that are run along with this one."""
    names = set(read_cover())
    assert len(names) > 10
    assert names <= CORE.keys()
    left = {
        name
        for item in request.session.items
        if (name := item.nodeid.removeprefix("tests/")) in names and "sweep" in item.keywords
    }
    assert not left


def test_a_cover_finds_all_that_is_found_in_little_time():
    found = {"slow": {"a", "b", "c"}, "quick": {"a"}, "other": {"b", "c"}, "none": set()}
    seconds = {"slow": 9.0, "quick": 1.0, "other": 3.0, "none": 0.1}
    assert cover(found, seconds) == ["quick", "other"]
    assert cover(found, seconds | {"slow": 1.5}) == ["slow"]  # which makes the other idle
    assert cover({"none": set()}, seconds) == []


def test_the_page_tells_what_was_found_and_what_was_not_run(tmp_path):
    (one, other, third, *_), (first, second, *_) = CORE, FAULTS
    lines = [
        Found(test=one, fault="", how="passes", seconds=2.0, reached=(first, second)),
        Found(test=one, fault=first, how="fails", seconds=2.0),
        Found(test=one, fault=second, how="passes", seconds=2.0),
        Found(test=other, fault="", how="passes", seconds=1.0),
    ]
    (tmp_path / "cells.jsonl").write_text("".join(each.line() for each in lines))
    results = known(tmp_path)
    assert [results[each.test, each.fault] for each in lines][1].how == "fails"
    assert by_test(results)[one] == {first}
    rows = {line.split("`")[1]: line for line in page(results).splitlines() if line[:3] == "| `"}
    cells = {name: line.split(" | ")[3:6] for name, line in rows.items()}
    assert cells[first] == ["fails", "", "?"]
    assert cells[second] == [".", "", "?"]
    assert f"| **1** | `{one}` | 2.0 | 1 |" in page(results)
    assert f"| 2 | `{other}` | 1.0 | 0 |" in page(results)
    assert third not in {test for test, _ in results}
    assert json.loads(lines[0].line())["reached"] == [first, second]
