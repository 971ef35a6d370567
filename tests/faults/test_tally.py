"""The fuzz fails where a fault does not happen any more, or a run ends otherwise than it has to."""

import random
from dataclasses import replace

import pytest
from attempts import FAILED, TERMINATED, WHOLE, Ending
from draws import STEPS, Draw, drawn
from fuzzed_run import WrongEndError, judge
from refused import require_nothing_written, require_refused
from tally import ENOUGH, Tally

pytestmark = pytest.mark.quick


def tally(*silent: str, seed: int = 0) -> Tally:
    """Of the fuzz's draws, in which faults of a ``silent`` kind or place do not happen."""
    found = Tally()
    for number in range(ENOUGH):
        draw = drawn(random.Random(f"{seed} {number}").choice)
        assert Draw.from_json(draw.to_json()) == draw
        fired = not {draw.fault.kind, draw.where} & {*silent}
        way = {"none": WHOLE, "sigterm": TERMINATED}.get(draw.fault.kind, FAILED)
        fired_way = way if fired else WHOLE
        found.add(draw, Ending(ways=[fired_way], losses=[], said=[], fired=fired))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_enough_draws_come_to_everything(seed):
    assert tally(seed=seed).shortcomings() == []


@pytest.mark.parametrize(
    ("silent", "named"),
    [
        ("kill", "the fault kill"),
        ("exchange", "a fault at exchange"),
        ("flush", "a fault at flush"),
        ("its model", "a fault at its model"),
        ("export's end", "a fault at export's end"),
    ],
)
def test_a_fault_that_never_happens_fails_the_fuzz(silent, named):
    assert tally(silent).shortcomings() == [f"{ENOUGH} draws have never come to {named}"]


def draw_of(kind: str) -> Draw:
    draws = (drawn(random.Random(f"0 {number}").choice) for number in range(ENOUGH))
    return next(each for each in draws if each.fault.kind == kind)


def test_a_wrong_draw_fails_the_fuzz():
    found = Tally()
    found.add(draw_of("kill"), None)
    assert found.shortcomings() == ["1 draws end otherwise than they have to"]


def test_a_run_that_does_not_mind_sigterm_is_wrong():
    """But in the last step, behind whose end nobody asks."""
    expected = dict.fromkeys(range(1, STEPS + 1), 2.0)
    whole = Ending(ways=[WHOLE], losses=[expected], said=[""], fired=True, fired_in=STEPS)
    judge(draw_of("sigterm"), whole, expected)
    with pytest.raises(WrongEndError, match="as if there were no sigterm"):
        judge(draw_of("sigterm"), replace(whole, fired_in=STEPS - 1), expected)


TOLD = "loongplug: error [rank 0]: --lr: 0.01 on rank 0; 0.02 on rank 1\n"
REFUSED = Ending(ways=[FAILED, FAILED], losses=[{}, {}], said=[TOLD, ""], fired=False)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"ways": [FAILED, WHOLE]}, "ends as"),
        ({"losses": [{1: 2.0}, {}]}, "takes steps"),
        ({"said": [TOLD, TOLD]}, "there are 2 messages"),
        ({"said": [TOLD.replace("--lr", "it"), ""]}, r"not tell of \['--lr'\]"),
        ({"said": [TOLD, "Traceback (most recent"]}, "traceback"),
    ],
)
def test_what_has_to_be_refused_ends_with_one_sentence_before_the_first_step(other, words):
    require_refused(REFUSED, "--lr", "rank 1")
    with pytest.raises(WrongEndError, match=words):
        require_refused(replace(REFUSED, **other), "--lr", "rank 1")


def test_a_refused_run_that_writes_is_wrong(tmp_path):
    require_nothing_written(tmp_path, tmp_path / "elsewhere")
    (tmp_path / "iter_0000002").mkdir()
    with pytest.raises(WrongEndError, match="iter_0000002"):
        require_nothing_written(tmp_path)
