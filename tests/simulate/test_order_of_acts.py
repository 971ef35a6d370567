"""The clock: by hand, by formula, against a slow walk, and what it says of ranks that hang."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn_programs import Slow, programs
from hypothesis import given
from hypothesis import strategies as st

from loongplug import simulate
from loongplug.simulate.clock import replay, run, step_time
from loongplug.simulate.order import Deadlock, order
from loongplug.simulate.programs import Act, Build, Meet, Post, Programs, Wait, Work

pytestmark = pytest.mark.quick


def row(stages: int, microbatches: int, *, forward: int, backward: int) -> Programs:
    """Stages in a row: all forwards, then all backwards."""
    build, ranks = Build(), []
    for stage in range(stages):
        acts: list[Act] = []
        for way, takes, step in (("forward", forward, 1), ("backward", backward, -1)):
            first = stage == (0 if step > 0 else stages - 1)
            for number in range(microbatches):
                if not first:
                    acts.append(Wait(((build.message((way, stage - step), number), False),)))
                acts += [Work(takes), Post(((build.message((way, stage), number), True),))]
        ranks.append(acts)
    return build.programs(ranks)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 7])
def test_a_row_of_stages_has_its_bubble(stages: int, microbatches: int) -> None:
    found = run(row(stages, microbatches, forward=2, backward=3))
    assert found.step == (microbatches + stages - 1) * 5
    assert set(found.idle) == {(stages - 1) * 5}


def test_by_hand() -> None:
    """Rank 1 takes what rank 0 sends; a rendezvous is behind both, a transfer takes its time."""
    build = Build()
    sent, met = build.message("sent", 0, takes=5), build.message("met", 0, eager=False, takes=1)
    both = build.group([0, 1])
    first = [
        Work(2, holds=7),
        Post(((sent, True), (met, True))),
        Wait(((sent, True), (met, True))),
        Work(3, holds=-7),
        Meet(both, 2),
    ]
    second = [
        Wait(((sent, False),)),
        Work(4, holds=3),
        Post(((met, False),)),
        Wait(((met, False),)),
        Meet(both, 1),
        Work(1, holds=2),
    ]
    found = run(build.programs([first, second]))
    # Sent from 2 to 7; work to 11; met at 12; rank 0 works to 15; both go on at 17.
    assert found.ends == (17, 18)
    assert found.busy == (5, 5)
    assert found.idle == (13, 13)
    assert found.held == (7, 5)
    assert found.came == (7, 12)
    assert [each[2:] for each in found.spans[0]] == [(0, 2), (12, 15)]
    assert [(each.rank, each.act) for each in found.critical] == [(0, 0), (1, 1), (0, 3), (1, 5)]


@given(programs(), st.randoms(use_true_random=False))
def test_whoever_goes_first_the_step_is_that_of_a_slow_walk(
    drawn: Programs, chance: object
) -> None:
    turns = [*range(len(drawn.ranks))]
    chance.shuffle(turns)  # type: ignore[attr-defined]
    found = run(drawn)
    assert found.step == Slow(drawn, turns).step() == step_time(drawn)
    assert all(type(each) is int for each in (*found.ends, *found.busy))
    assert found.step >= max(found.busy)
    assert found.critical == () or found.critical[-1].end <= found.step


@given(programs(), st.integers(0, 2**32 - 1))
def test_many_costs_are_as_many_runs(drawn: Programs, seed: int) -> None:
    works = sum(isinstance(act, Work) for acts in drawn.ranks for act in acts)
    costs = np.random.default_rng(seed).integers(0, 50, (works, 3))
    found = replay(order(drawn), costs) if works else np.zeros(3)
    for number in range(3 if works else 0):
        left = iter(costs[:, number].tolist())
        ranks = tuple(
            tuple(act._replace(takes=next(left)) if isinstance(act, Work) else act for act in acts)
            for acts in drawn.ranks
        )
        assert found[number] == step_time(replace(drawn, ranks=ranks))


@given(programs(), st.data())
def test_an_end_that_is_left_out_is_named(drawn: Programs, data: st.DataObject) -> None:
    """Where somebody waits for it."""
    places = [
        (rank, number)
        for rank, acts in enumerate(drawn.ranks)
        for number, act in enumerate(acts)
        if isinstance(act, Post)
    ]
    if not places:
        return
    rank, number = data.draw(st.sampled_from(places))
    acts = drawn.ranks[rank]
    ((message, sends),) = acts[number].ends  # type: ignore[union-attr]
    without = (*acts[:number], *acts[number + 1 :])
    ranks = (*drawn.ranks[:rank], without, *drawn.ranks[rank + 1 :])
    if not sends and drawn.messages[message].eager:
        assert step_time(replace(drawn, ranks=ranks)) == step_time(drawn)
        return
    with pytest.raises(Deadlock, match=str(drawn.messages[message])):
        run(replace(drawn, ranks=ranks))
    twice = (*acts[:number], acts[number], *acts[number:])
    with pytest.raises(AssertionError, match="goes twice"):
        run(replace(drawn, ranks=(*drawn.ranks[:rank], twice, *drawn.ranks[rank + 1 :])))


def test_who_waits_for_whom_is_one_sentence() -> None:
    """Ranks 1 and 2 wait for each other, rank 0 for one of them."""
    build = Build()
    states = [build.message(("states", stage), 3) for stage in range(3)]
    ranks: list[list[Act]] = [
        [Wait(((states[1], False),))],
        [Wait(((states[2], False),)), Post(((states[1], True),))],
        [Wait(((states[1], False),)), Post(((states[2], True),))],
    ]
    with pytest.raises(Deadlock) as found:
        run(build.programs(ranks))
    assert str(found.value) == (
        "rank 1 waits for rank 2 to send states 2 3; "
        "rank 2 waits for rank 1 to send states 1 3, for ever"
    )
    assert [each.rank for each in found.value.ring] == [1, 2]


def test_a_meeting_that_somebody_misses_is_named() -> None:
    build = Build()
    group, message = build.group([0, 1]), build.message("loss", 0)
    met: list[list[Act]] = [[Meet(group), Meet(group)], [Meet(group)]]
    with pytest.raises(Deadlock, match=r"^rank 0 waits for rank 1 to meet ranks 0, 1, for ever$"):
        run(build.programs(met))
    alone: list[list[Act]] = [[Wait(((message, False),))], []]
    with pytest.raises(Deadlock, match=r"^rank 0 waits for somebody to send loss 0, for ever$"):
        run(build.programs(alone))


def test_the_clock_knows_no_model_and_no_mode() -> None:
    """It imports traces alone; what is planned by it lies above."""
    folder = Path(simulate.__file__).parent
    imports = {
        node.module
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("loongplug")
    }
    others = {each for each in imports if not each.startswith("loongplug.simulate")}
    assert others == {"loongplug.observe.trace_file"}
