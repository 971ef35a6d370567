"""Whole runs on prepared energon datasets: the losses of the same rows as JSONL, and resume."""

from pathlib import Path

import pytest
from energon_folders import of_demo
from layout_flags import PP2
from ranks import RankError, run_ranks

from loongplug.training.run import run

ENERGON = ("--dataloader-type", "energon")


@pytest.fixture(scope="module")
def prepared(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.energon")
    return of_demo(demo, tmp_path_factory.mktemp("energon"), shards=4, validation=16)


def losses(rank: int, *, flags: list[str]) -> list[float]:
    try:
        return [step.loss for step in run(flags)]
    except SystemExit as ended:
        return [] if not ended.code else [float(ended.code)]


def train(flags: list[str], *more: str, ranks: int) -> list[float]:
    found = run_ranks(losses, ranks, flags=[*flags, *more], timeout=150.0)
    assert found == [found[0]] * ranks
    return found[0]


@pytest.mark.slow
def test_a_run_is_that_of_the_same_rows_as_jsonl_and_resumes(flags, demo, prepared, tmp_path):
    common = [*flags, "--eval-iters", "1", "--eval-interval", "2", "--num-workers", "1"]
    rows = ("--valid-data-path", str(demo / "test.jsonl"))
    shards = ("--train-data-path", str(prepared), "--valid-data-path", str(prepared), *ENERGON)
    expected = train([*common, *rows], *PP2, ranks=2)
    assert len(expected) == 4
    assert train([*common, *shards], *PP2, ranks=2) == expected
    save = ("--save", str(tmp_path))
    train([*common, *shards], *PP2, *save, "--exit-interval", "2", ranks=2)
    assert (
        train([*common, *shards], *PP2, *save, "--load", str(tmp_path), ranks=2) == (expected[2:])
    )
    # The shards are another dataset than the file, though the samples are the same.
    with pytest.raises(RankError, match=r"rows file 1 bytes was"):
        train([*common, *rows], *PP2, *save, "--load", str(tmp_path), ranks=2)
