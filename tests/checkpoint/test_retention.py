"""``--keep-checkpoints``: which checkpoints stay, and that nothing else goes."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from loongplug.checkpoint.atomic_saves import remove_left_overs
from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.retention import LOSSES_FILE, CheckpointRetention, to_remove
from loongplug.training.run import run


@pytest.mark.quick
@given(
    iterations=st.sets(st.integers(1, 40)),
    losses=st.dictionaries(st.integers(1, 40), st.floats(allow_infinity=True)),
    newest=st.integers(1, 40),
    keep=st.integers(1, 5),
)
def test_the_newest_and_the_best_stay(iterations, losses, newest, keep):
    there = iterations | {newest}
    gone = to_remove(there, losses, newest=newest, keep=keep)
    stay = there - set(gone)
    upto = sorted(each for each in there if each <= newest)
    assert stay >= set(upto[-keep:]) | {each for each in there if each > newest}
    assert len([each for each in stay if each <= newest]) <= keep + 1
    scored = {each: losses[each] for each in upto if math.isfinite(losses.get(each, math.nan))}
    if scored:
        assert min(scored.values()) in {scored.get(each) for each in stay}


def checkpoint(folder: Path, iteration: int, *, whole: bool = True) -> Path:
    made = folder / f"iter_{iteration:07d}"
    made.mkdir()
    for name in (".metadata", "metadata.json") if whole else ("__0_0.distcp",):
        (made / name).write_text("")
    (folder / TRACKER).write_text(str(iteration))
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*iter_*"))


@pytest.mark.quick
def test_losses_are_known_to_runs_that_go_on(tmp_path):
    first = CheckpointRetention(tmp_path, keep=1)
    for iteration, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        first.evaluated(iteration, loss)
        checkpoint(tmp_path, iteration)
        first.prune()
    assert names(tmp_path) == ["iter_0000002", "iter_0000003"]
    assert json.loads((tmp_path / LOSSES_FILE).read_text()) == {"2": 1.0, "3": 3.0}
    then = CheckpointRetention(tmp_path, keep=1)
    then.evaluated(4, 1.5)
    checkpoint(tmp_path, 4)
    then.prune()
    assert names(tmp_path) == ["iter_0000002", "iter_0000004"]
    # A run that starts again behind them: 2 is written again, without an evaluation.
    again = CheckpointRetention(tmp_path, keep=1)
    (tmp_path / TRACKER).write_text("2")
    again.prune()
    assert json.loads((tmp_path / LOSSES_FILE).read_text()) == {"4": 1.5}
    again.evaluated(3, 1.2)
    checkpoint(tmp_path, 3)
    again.prune()
    assert names(tmp_path) == ["iter_0000003", "iter_0000004"]


@pytest.mark.quick
def test_what_is_being_written_and_what_is_no_checkpoint_stays(tmp_path, capsys):
    kept = CheckpointRetention(tmp_path, keep=1)
    checkpoint(tmp_path, 1, whole=False)  # another run's, on another host
    (tmp_path / "iter_final").mkdir()
    (tmp_path / ".saving_iter_0000004_0a").mkdir()
    checkpoint(tmp_path, 2)
    (tmp_path / LOSSES_FILE).write_text("{}x")  # damaged
    checkpoint(tmp_path, 3)
    kept.prune()
    assert names(tmp_path) == [
        ".saving_iter_0000004_0a",
        "iter_0000001",
        "iter_0000003",
        "iter_final",
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.quick
def test_one_that_cannot_be_removed_ends_no_run(tmp_path, capsys, monkeypatch):
    kept = CheckpointRetention(tmp_path, keep=1)
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)

    def refuse(path: Path) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refuse)
        kept.prune()
    assert "iter_0000001 cannot be removed: busy" in capsys.readouterr().err
    remove_left_overs(tmp_path, keep=set())  # as the next save does
    assert names(tmp_path) == ["iter_0000002"]


def train(rank: int, *, flags: list[str]) -> None:
    run(flags)


@pytest.mark.slow
def test_a_run_keeps_the_newest_and_the_best(run_flags, demo, tmp_path):
    """The rate is so high that the loss grows: the first evaluation is the best."""
    saves = ["--save", str(tmp_path), "--save-interval", "1", "--keep-checkpoints", "2"]
    saves.append("--async-save")
    evaluates = ["--valid-data-path", str(demo / "test.jsonl"), "--eval-interval", "1"]
    grows = ["--lr", "3", "--train-iters", "5", "--eval-iters", "1", "--lr-decay-style", "constant"]
    run_ranks(train, 2, flags=[*run_flags, *evaluates, *grows, *saves], timeout=240.0)
    losses = json.loads((tmp_path / LOSSES_FILE).read_text())
    there = {int(name[5:]) for name in names(tmp_path)}
    best = min(losses, key=losses.__getitem__)
    assert there == {4, 5, int(best)}
    assert {int(iteration) for iteration in losses} == there
    assert int(best) < 4
