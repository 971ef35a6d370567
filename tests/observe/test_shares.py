"""What a rank's time went to, against counting moment by moment."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongplug.observe.shares import (
    COMPUTING,
    STATES,
    TRANSFERS,
    difference,
    intersection,
    length,
    sections,
    shares,
    states,
    union,
)
from loongplug.observe.trace_file import TraceEvent

pytestmark = pytest.mark.quick

END = 30
interval = st.tuples(st.integers(0, END), st.integers(0, END))
intervals = st.lists(interval, max_size=8)
phases = st.sampled_from(["step", "exchange", "data", "evaluation", *COMPUTING, *TRANSFERS])


def event(phase: str, start: int, end: int) -> TraceEvent:
    return TraceEvent(phase=phase, name=phase, start=start, end=end, step=1, details={})


events = st.lists(
    st.builds(
        lambda phase, ends: event(phase, min(ends), max(ends)),
        phases,
        interval,
    ),
    max_size=10,
)


def moments(given_intervals) -> set[int]:
    return {moment for start, end in given_intervals for moment in range(start, end)}


def tidy(given_intervals) -> bool:
    edges = [edge for one in given_intervals for edge in one]
    return edges == sorted(set(edges))


@settings(deadline=None)
@given(intervals, intervals)
def test_intervals_are_sets_of_moments(first, second):
    one, other = union(first), union(second)
    for found, expected in (
        (one, moments(first)),
        (intersection(one, other), moments(first) & moments(second)),
        (difference(one, other), moments(first) - moments(second)),
    ):
        assert moments(found) == expected
        assert tidy(found)
        assert length(found) == len(expected)


def state_at(moment: int, given_events: list[TraceEvent]) -> str:
    """The documented order, told once more and differently."""
    there = {each.phase for each in given_events if each.start <= moment < each.end}
    there |= {"waiting"} if there & {"p2p", "collective", "wait"} else {"idle"}
    order = "data exchange encoder_backward encoder_forward backward forward forward_backward"
    return next(
        state
        for state in (*order.split(), "waiting", "optimizer", "gradients", "idle")
        if state in there | {"idle"}
    )


@settings(max_examples=200, deadline=None)
@given(events, st.tuples(st.integers(0, 10), st.integers(10, END)))
def test_each_moment_is_in_one_state(given_events, window):
    found = states(window, given_events)
    assert list(found) == list(STATES)
    for state in STATES:
        expected = {at for at in range(*window) if state_at(at, given_events) == state}
        assert moments(found[state]) == expected, state
    measured = shares(window, given_events)
    assert sum(measured.by_state.values()) == window[1] - window[0]
    assert 0.0 <= measured.bubble <= 1.0  # also of an empty window


def test_transfers_of_the_model_are_computing_and_others_are_bubble():
    given_events = [
        event("forward", 0, 40),
        event("collective", 10, 30),  # a tensor parallel one
        event("p2p", 40, 60),
        event("wait", 50, 70),
        event("data", 0, 5),
        event("gradients", 72, 80),
        event("collective", 74, 79),  # of what the ranks have after all computing
        event("backward", 80, 100),
    ]
    measured = shares((0, 100), given_events)
    assert {state: spent for state, spent in measured.by_state.items() if spent} == {
        "data": 5,
        "forward": 35,
        "waiting": 35,
        "gradients": 3,
        "idle": 2,
        "backward": 20,
    }
    assert measured.bubble == 0.42
    assert measured.computing_in_transfers == 20


def test_a_step_is_cut_where_the_schedule_turns():
    given_events = [
        event("forward", 10, 20),
        event("forward", 20, 30),
        event("backward", 40, 50),
        event("forward", 50, 60),
        event("backward", 60, 70),
        event("backward", 75, 85),
        event("optimizer", 90, 95),
    ]
    assert sections((0, 100), given_events) == {
        "warm-up": (0, 40),
        "steady": (40, 60),
        "cool-down": (60, 85),
        "update": (85, 100),
    }


def test_combined_steps_are_of_the_microbatches_that_they_tell():
    forward, backward = {"microbatch": 1}, {"backward_microbatch": 0}
    given_events = [
        TraceEvent(phase="forward_backward", name="", start=start, end=end, step=1, details=details)
        for start, end, details in (
            (10, 20, forward),
            (30, 50, forward | backward),
            (60, 70, backward),
        )
    ]
    assert sections((0, 80), given_events) == {
        "warm-up": (0, 30),
        "steady": (30, 50),
        "cool-down": (50, 70),
        "update": (70, 80),
    }


@settings(deadline=None)
@given(events)
def test_sections_fill_the_step(given_events):
    parts = list(sections((0, END), given_events).values())
    if len(parts) == 1:  # nothing goes back, or forward
        assert not {"forward", "backward"} <= {each.phase for each in given_events}
    assert parts[0][0] == 0
    assert parts[-1][1] == END
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    assert all(start <= end for start, end in parts)
