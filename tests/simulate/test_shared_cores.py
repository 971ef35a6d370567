"""Ranks on fewer cores than there are, and their steps as traces."""

import json
from pathlib import Path

import pytest
from drawn_programs import programs
from hypothesis import given
from hypothesis import strategies as st

from loongplug.observe.chrome import write_chrome_trace
from loongplug.observe.picture import draw_timeline
from loongplug.observe.shares import shares
from loongplug.simulate.clock import run, run_shared, traces
from loongplug.simulate.programs import Act, Build, Label, Post, Programs, Wait, Work

pytestmark = pytest.mark.quick


def two_and_one() -> Programs:
    """Ranks 0 and 1 work 4 and 6; rank 2 works 2 when it has what rank 0 sends."""
    build = Build()
    message = build.message("rows", 0, takes=1)
    ranks: list[list[Act]] = [
        [Work(4, Label("forward", 0, 1)), Post(((message, True),))],
        [Work(6, Label("backward", 2))],
        [Wait(((message, False),)), Work(2, Label("encoder_forward"))],
    ]
    return build.programs(ranks, places=[{"pp": 0}, {"pp": 1}, {"pp": 2}])


def test_two_on_one_core_by_hand() -> None:
    """Rank 0 to 8, rank 1 has 2 left: alone to 9, with rank 2 to 11, which has 1 left: to 12."""
    found = run_shared(two_and_one(), cores=1)
    assert found.ends == pytest.approx((8, 11, 12))
    assert found.busy == (4, 6, 2)


@given(programs(), st.integers(1, 4))
def test_fewer_cores_take_longer(drawn: Programs, cores: int) -> None:
    free, found = run(drawn), run_shared(drawn, cores=cores)
    if cores >= len(drawn.ranks):
        assert found.ends == pytest.approx(free.ends)
    assert found.step >= free.step - 1e-6
    assert found.step >= sum(free.busy) / cores - 1e-6


def test_traces_are_drawn_as_those_of_a_run(tmp_path: Path) -> None:
    programs = two_and_one()
    found = traces(run(programs), programs, nanoseconds=1e6)
    assert [each.label() for each in found] == ["0 pp0", "1 pp1", "2 pp2"]
    assert found[0].whole_steps() == {1}
    forward = found[0].events[1]
    assert (forward.phase, forward.start, forward.end) == ("forward", 0, 4_000_000)
    assert forward.details == {"microbatch": 0, "chunk": 1}
    measured = {each.rank: shares((0, 7_000_000), each.events) for each in found}
    assert measured[2].bubble == pytest.approx(5 / 7)
    draw_timeline(found, measured, tmp_path / "timeline.png", step=1)
    write_chrome_trace(found, tmp_path / "trace.json")
    names = [
        row["name"] for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ]
    assert {"forward 0 (chunk 1)", "backward 2", "encoder forward"} <= {*names}
