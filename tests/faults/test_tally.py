"""The fuzz fails where a fault does not happen any more."""

import random

import pytest
from attempts import FAILED, TERMINATED, WHOLE, Ending
from draws import STEPS, Draw, drawn
from fuzz_runs import shortcomings
from fuzzed_run import WrongEndError, judge
from tally import ENOUGH, Tally

pytestmark = pytest.mark.quick


def ending(draw: Draw, *, fired: bool = True) -> Ending:
    """As a run in which the draw's fault happens, or does not, has to end."""
    way = {"none": WHOLE, "sigterm": TERMINATED}.get(draw.fault.kind, FAILED)
    return Ending(
        ways=[way if fired else WHOLE],
        losses=[],
        said=[],
        fired=fired and draw.fault.kind != "none",
    )


def tally(draws: list[Draw], *, silent: tuple[str, ...] = ()) -> Tally:
    """Of ``draws``, in which faults of a ``silent`` kind or place do not happen."""
    found = Tally()
    for draw in draws:
        found.add(draw, ending(draw, fired=not {draw.fault.kind, draw.where} & {*silent}))
    return found


def first(number: int, *, seed: int = 0) -> list[Draw]:
    """As ``fuzz_runs.py`` draws them."""
    return [drawn(random.Random(f"{seed} {each}").choice) for each in range(number)]


@pytest.mark.parametrize("seed", range(5))
def test_enough_draws_come_to_everything(seed):
    assert shortcomings(tally(first(ENOUGH, seed=seed)), whole=True) == []


@pytest.mark.parametrize(
    ("silent", "named"),
    [
        ("kill", "the fault kill"),
        ("exchange", "a fault at exchange"),
        ("flush", "a fault at flush"),
        ("media", "a fault at media"),
        ("its model", "a fault at its model"),
        ("description", "a fault at description"),
        ("outputs", "a fault at outputs"),
        ("export's end", "a fault at export's end"),
    ],
)
def test_a_fault_that_never_happens_fails_the_fuzz(silent, named):
    found = tally(first(ENOUGH), silent=(silent,))
    assert shortcomings(found, whole=True) == [f"{ENOUGH} draws have never come to {named}"]
    # A few draws need not come to everything.
    assert shortcomings(found, whole=False) == []


def test_a_wrong_draw_fails_the_fuzz_and_counts_as_no_fault():
    found = Tally()
    draw = next(draw for draw in first(ENOUGH) if draw.fault.kind == "kill")
    found.add(draw, None)
    assert shortcomings(found, whole=False) == ["1 draws end otherwise than they have to"]
    assert "the fault kill" in found.never()


def test_a_run_that_does_not_mind_sigterm_is_wrong():
    """But in the last step, behind whose end nobody asks."""
    draw = next(each for each in first(ENOUGH) if each.fault.kind == "sigterm")
    expected = dict.fromkeys(range(1, STEPS + 1), 2.0)

    def whole(step: int) -> Ending:
        return Ending(ways=[WHOLE], losses=[expected], said=[""], fired=True, fired_in=step)

    judge(draw, whole(STEPS), expected)
    with pytest.raises(WrongEndError, match="as if there were no sigterm"):
        judge(draw, whole(STEPS - 1), expected)
    unheard = Tally()
    for each in first(ENOUGH):
        heard = each.fault.kind != "sigterm"
        unheard.add(each, ending(each) if heard else whole(STEPS))
    assert f"{ENOUGH} draws have never come to the fault sigterm" in shortcomings(
        unheard, whole=True
    )
