"""Both modes where there is little to share out, in evaluation, and which rank has what images."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from compared_runs import same, train
from layout_flags import DP, FULL, OVERLAP, SP, TP2, VPP2
from PIL import Image
from ranks import run_ranks

from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.executor import Executor
from loongplug.training.run import run

pytestmark = pytest.mark.slow


def rows(count: int, *, with_images: dict[int, list[tuple[int, int]]], folder: Path) -> str:
    """A file of short rows; some have images, of these sizes in pixels."""
    lines = []
    for number in range(count):
        parts: list[dict[str, str]] = []
        for index, size in enumerate(with_images.get(number, ())):
            image = folder / f"{number}-{index}.png"
            Image.effect_noise(size, 80).convert("RGB").save(image)
            parts.append({"type": "image", "image": str(image)})
        parts.append({"type": "text", "text": f"how many? {number}"})
        user = {"role": "user", "content": parts}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"{number * 37}"}]}
        lines.append(json.dumps({"messages": [user, answer]}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


BIG, SMALL = (256, 192), (32, 32)  # 48 tokens and 1
# Which of the eight rows of each step have images.
ROWS: dict[str, dict[int, list[tuple[int, int]]]] = {
    "all-but-one-text": {3: [BIG]},
    "one-text": {**{n: [SMALL] * (n % 3 + 1) for n in range(7)}, 2: [BIG], 5: [(160, 160), SMALL]},
    "all-text": {},
}
# Every data set and both modes; the parity matrix has many more layouts.
CASES: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    # The large image's tokens lie in both halves of the sequence, in one row of two.
    ("all-but-one-text", "full-tp2-sp-pairs"): (4, (*FULL, *TP2, SP, "--micro-batch-size", "2")),
    ("one-text", "dp-sp"): (2, (*DP, SP)),
    ("one-text", "full-overlap"): (2, (*FULL, *OVERLAP)),
    ("all-text", "dp-overlap"): (2, (*DP, *OVERLAP)),
    # One unit a step: a rank without any has to go through its encoder, as others wait for it.
    ("all-but-one-text", "full-one-unit"): (
        2,
        (*FULL, *OVERLAP, "--micro-batch-size", "4", "--global-batch-size", "4"),
    ),
}


@pytest.fixture(scope="module")
def flags(flags, weights):
    """Two steps from weights that all runs load, one sample a microbatch."""
    return [*flags, "--load-hf", weights, "--train-iters", "2", "--micro-batch-size", "1"]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """A data set's flags, and what the single rank makes of it, made once each."""
    files = {
        data: rows(8, with_images=images, folder=tmp_path_factory.mktemp(data))
        for data, images in ROWS.items()
    }
    made: dict[Any, Any] = {}

    def of(data: str, batch: tuple[str, ...]):
        if (data, batch) not in made:
            run = [*flags, "--train-data-path", files[data], *batch]
            made[data, batch] = run, train(run)
        return made[data, batch]

    return of


@pytest.mark.parametrize(("data", "name"), CASES)
def test_few_images_and_uneven_ones(alone, data, name):
    ranks, layout = CASES[data, name]
    batch = layout[-2:] if "--global-batch-size" in layout else ()
    flags, expected = alone(data, batch)
    found = train(flags, *layout, ranks=ranks)
    assert same(found, expected), (found, expected)


def test_evaluation_takes_each_row_once_and_leaves_training_alone(flags, demo, tmp_path, capfd):
    """The mean over five rows, as they are in one step alone, where no place is blank."""
    layout = (*FULL, *VPP2, *OVERLAP)
    few = demo / "five.jsonl"  # beside its images
    few.write_text("".join((demo / "test.jsonl").open().readlines()[:5]))
    evaluation = ("--valid-data-path", str(few), "--eval-interval", "1")
    fours, five = ("--eval-global-batch-size", "4"), ("--eval-global-batch-size", "5")
    found = {}
    for name, ranks, more in (
        ("alone", 1, (*five, "--eval-micro-batch-size", "5")),
        ("dp2", 2, (*fours, "--eval-iters", "9")),
        ("layout", 2, (*fours, *layout)),
    ):
        metrics = tmp_path / f"{name}.json"
        steps = train(flags, *evaluation, *more, "--metrics-json", str(metrics), ranks=ranks)
        found[name] = json.loads(metrics.read_text())["valid_loss"]
    assert steps == train(flags, *layout, ranks=2)
    assert found["dp2"] == pytest.approx(found["alone"], rel=2e-5)
    assert found["layout"] == pytest.approx(found["alone"], rel=2e-5)
    said = " 5 of 5 rows, each once, in 2 steps of 4\n"
    assert capfd.readouterr().out.count(said) == 2


@pytest.mark.parametrize("layout", [pytest.param((*FULL, *OVERLAP), id="full")])
def test_bf16(flags, layout):
    """Payloads travel in the decoder's precision, gradients too."""
    expected = train(flags, "--bf16")
    found = train(flags, "--bf16", *layout, ranks=2)
    for step, step_alone in zip(found, expected, strict=True):
        assert step == pytest.approx(step_alone, rel=2e-2)


@pytest.mark.parametrize("layout", [(*DP, SP)], ids=["dp-sp"])
def test_packs(flags, layout):
    packed = ("--packing", "--seq-length", "128", "--global-batch-size", "4")
    assert same(train(flags, *layout, *packed, ranks=2), train(flags, *packed))


def test_groups_of_microbatches_and_features_of_earlier_steps_are_let_go(flags):
    """Without the help of Python's collector, which does not see through torch's hooks."""
    for most, alive in run_ranks(kept, 2, flags=[*flags, *DP], timeout=120.0):
        assert most == 1  # groups, between their forward and their backward
        assert len(alive) >= 2
        assert set(alive) == {0}


def kept(rank: int, *, flags: list[str]) -> tuple[int, list[int]]:
    """The most groups at a time; after each step, how many units' features are still there."""
    most, leaves, alive = 0, [], []
    features, gather, end = Executor.features, ExecutedStep._gather, Executor.end

    def taken(self: Executor, number: int) -> Any:
        nonlocal most
        found = features(self, number)
        most = max(most, len(self._now.own))
        return found

    def gathered(self: ExecutedStep, units: range, *, to_host: bool) -> None:
        gather(self, units, to_host=to_host)
        leaves.extend(weakref.ref(each) for each in self.features.values())

    def counted(self: Executor) -> None:
        end(self)
        alive.append(sum(leaf() is not None for leaf in leaves))

    Executor.features, ExecutedStep._gather, Executor.end = taken, gathered, counted
    run(flags)
    assert leaves
    return most, alive
