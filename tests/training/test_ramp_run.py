"""Whole runs whose steps grow, with samples left out on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
from compared_runs import Steps, same, steps, train
from cut_images import cut
from layout_flags import BALANCED, OVERLAP, PP2, SEPARATED, TP2
from ranks import RankError

from loongplug.data.planned_media import Assignment
from loongplug.data.source import LocalSource

pytestmark = pytest.mark.slow

DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
SHARDED = "--use-distributed-optimizer"
SINGLES, WORKERS = ("--micro-batch-size", "1"), ("--num-workers", "2")
# Steps of 6, 6, 10, 14, 14: an odd number of microbatches of 2 in each.
SIZES = [6, 6, 10, 14, 14]
RAMP = ("--rampup-batch-size", "6", "4", "16", "--global-batch-size", "14")
AS_SCHEDULE = ("--step-batch-size-schedule", f"0:6 {8 * 80}:10 {16 * 80}:14")


@pytest.fixture(scope="module")
def some_bad(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of data with rows that have damaged images, and one that is none."""
    folder = tmp_path_factory.mktemp("some-bad")
    rows = (demo / "train.jsonl").read_text().splitlines()
    with_image = [number for number, row in enumerate(rows) if '"image"' in row]
    for number in with_image[::5]:
        rows[number] = cut(rows[number], source=demo, folder=folder)
    rows[with_image[1]] = "{"
    (folder / "rows.jsonl").write_text("\n".join(rows))
    data = ("--train-data-path", str(folder / "rows.jsonl"), "--media-root", str(demo))
    return [*data, "--bad-sample", "skip"]


@pytest.fixture(scope="module")
def grows(flags, weights, some_bad, demo) -> list[str]:
    """Flags of all runs but for the batch and the layout."""
    return [
        *(*flags, *some_bad, "--load-hf", weights, "--train-iters", "5"),
        *("--lr-decay-style", "linear", "--min-lr", "1e-5", "--lr-warmup-iters", "2"),
        *("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1"),
        *("--eval-interval", "3", "--eval-global-batch-size", "10"),
    ]


def evaluated(flags: list[str], *more: str, folder: Path, **options: Any) -> tuple[Steps, Any]:
    """Losses and norms, and what the metrics have."""
    metrics = folder / "metrics.json"
    found = train(flags, *more, "--metrics-json", str(metrics), **options)
    return found, json.loads(metrics.read_text())


@pytest.fixture(scope="module")
def alone(grows, tmp_path_factory) -> tuple[Steps, Any]:
    """The single rank's, by Megatron's own flag."""
    at = grows.index("--global-batch-size")
    schedule = [*grows[:at], *grows[at + 2 :], *AS_SCHEDULE]
    return evaluated(schedule, folder=tmp_path_factory.mktemp("alone"))


def require_same(found: tuple[Steps, Any], expected: tuple[Steps, Any]) -> None:
    assert same(found[0], expected[0]), (found, expected)
    assert found[1]["valid_loss"] == pytest.approx(expected[1]["valid_loss"], rel=2e-5)
    assert found[1]["bad_samples"] == expected[1]["bad_samples"]


def test_megatron_s_schedule_takes_its_steps(alone):
    found, metrics = alone
    assert len(found) == len(SIZES)
    assert found[-1][0] < 0.95 * found[0][0]  # it learns, so a wrong update shows
    assert metrics["bad_samples"]["pixels"] > 2
    assert metrics["bad_samples"]["row"] == 1


def test_growing_steps_are_those_of_one_rank(grows, alone, tmp_path):
    """Groups of microbatches that ranks share out grow too, and the last ones are not whole."""
    layout = (DP, *TP2, *OVERLAP, "--eval-micro-batch-size", "5")
    require_same(evaluated(grows, *RAMP, *layout, folder=tmp_path, ranks=2), alone)


def planned(rank: int, *, flags: list[str], of_steps: Path) -> Steps:
    """As ``steps``; the first rank writes what each call was asked to assign, by loader."""
    original, plan = Assignment.of, LocalSource._plan
    asked: dict[int, list[list[int]]] = {}
    loaders: list[LocalSource] = []

    def of(self: Assignment, numbers: range, media: Any, *, step: int) -> Any:
        source = loaders[-1]
        blocks = asked.setdefault(id(source), [])
        first = sum(map(len, blocks))
        blocks.append([*range(first, first + len(media))])
        return original(self, numbers, media, step=step)

    def planning(self: LocalSource) -> None:
        loaders.append(self)
        plan(self)

    Assignment.of, LocalSource._plan = of, planning
    found = steps(rank, flags=flags)
    if rank == 0:
        of_steps.write_text(json.dumps(asked[id(loaders[0])]))
    return found


def blocks(file: Path) -> list[int]:
    """Sizes of the blocks, which follow one another."""
    asked = json.loads(file.read_text())
    assert [index for block in asked for index in block] == list(range(sum(map(len, asked))))
    return [len(block) for block in asked]


def test_balance_and_background_workers_follow_the_steps_also_after_a_resume(
    grows, alone, tmp_path
):
    layout = (FULL, *SEPARATED, *PP2, *BALANCED, *WORKERS, *RAMP, *OVERLAP)
    save = ("--save", str(tmp_path / "run"), "--save-interval", "1")
    of_steps = tmp_path / "steps.json"
    options = {"ranks": 2, "function": planned, "of_steps": of_steps}
    whole = evaluated(grows, *layout, *save, folder=tmp_path, **options)
    require_same(whole, alone)
    expected = [size // 2 for size in SIZES]
    assert blocks(of_steps)[:5] == expected
    # Within the steps of one size.
    resumed = [*grows, *layout, "--load", str(tmp_path / "run"), "--ckpt-step", "1"]
    found = evaluated(resumed, folder=tmp_path, **options)
    assert found[0] == whole[0][1:]
    assert found[1]["valid_loss"] == whole[1]["valid_loss"]
    assert blocks(of_steps)[:4] == expected[1:]
    with pytest.raises(RankError, match=r"lr_decay_steps was 50, is \d+ .*--override") as raised:
        train(resumed, "--train-iters", "4", ranks=2)
    assert len(raised.value.errors) == 2


def test_packs_grow_and_resume_in_the_middle(grows, tmp_path):
    ramp = ("--rampup-batch-size", "2", "1", "5", "--global-batch-size", "4")  # 2 2 3 4 4
    packing = ("--packing", "--packing-look-ahead", "4", "--seq-length", "160", *SINGLES)
    packs = [*grows, *packing, *ramp, "--eval-global-batch-size", "3"]
    expected = evaluated(packs, folder=tmp_path)
    layout = (FULL, *PP2, *BALANCED, SHARDED, "--num-workers", "1", "--save", str(tmp_path))
    whole = evaluated(packs, *layout, "--save-interval", "2", folder=tmp_path, ranks=2)
    require_same(whole, expected)
    found = train(packs, *layout, "--load", str(tmp_path), "--ckpt-step", "2", ranks=2)
    assert found == whole[0][2:]
