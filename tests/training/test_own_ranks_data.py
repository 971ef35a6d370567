"""Runs with the encoder on ranks of its own: bad samples, evaluation and answers as on one rank."""

import json
import shutil
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from compared_runs import same, train
from compared_runs import steps as steps_of
from cut_images import cut
from ranks import run_ranks
from surveyed import settings_of

from loongplug.data import dataset
from loongplug.data.check import index
from loongplug.data.data_options import RowAccess
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.sample_order import epoch_permutation

pytestmark = pytest.mark.slow

ROWS, SEED = 8, 1234


def lies(offset: int, *, dp: int = 1) -> tuple[str, ...]:
    """The encoder's ranks, behind the decoder's."""
    return (
        f"model.image_encoder.rank_offset={offset}",
        f"model.image_encoder.data_parallel_size={dp}",
    )


# Ranks in all, and flags.
LAYOUTS = {
    "two-decoders": (3, lies(2)),
    "two-encoders-of-two-stages": (
        5,
        (*lies(1, dp=2), "model.image_encoder.pipeline_model_parallel_size=2"),
    ),
}


def with_cut_images(rows: list[str], numbers: list[int], *, demo: Path, folder: Path) -> str:
    """A file of these rows, of which those with such ``numbers`` have damaged images."""
    folder.mkdir()
    cut_rows = [
        cut(row, source=demo, folder=folder) if number in numbers else row
        for number, row in enumerate(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(cut_rows) + "\n")
    return str(folder / "rows.jsonl")


@pytest.fixture(scope="module")
def evaluated(flags, weights, demo, tmp_path_factory):
    """Two steps, each an epoch, from weights that all runs load; an evaluation behind each.

    The last sample of the first epoch is damaged, and one in the middle of the second; so is one of
    the evaluation's, which goes through it one by one.
    """
    folder = tmp_path_factory.mktemp("data")
    sees = [row for row in (demo / "train.jsonl").read_text().splitlines() if '"image"' in row]
    first, second = (epoch_permutation(ROWS, seed=SEED, epoch=each) for each in (0, 1))
    bad = [int(first[-1]), int(second[ROWS // 2])]
    data = with_cut_images(sees[:ROWS], bad, demo=demo, folder=folder / "train")
    valid = with_cut_images(sees[ROWS : ROWS + 4], [1], demo=demo, folder=folder / "valid")
    return [
        *(*flags, "--load-hf", weights, "--train-iters", "2", "--seed", str(SEED)),
        *("--train-data-path", data, "--valid-data-path", valid, "--media-root", str(demo)),
        *("--eval-iters", "1", "--eval-interval", "1", "--bad-sample", "skip"),
        *("--eval-global-batch-size", "4", "--eval-micro-batch-size", "1"),
    ]


def run(evaluated: list[str], *more: str, ranks: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Losses and gradient norms, and what the metrics' file says."""
    metrics = folder / f"{ranks}.json"
    steps = train(evaluated, *more, "--metrics-json", str(metrics), ranks=ranks)
    return steps, json.loads(metrics.read_text())


@pytest.fixture(scope="module")
def alone(evaluated, tmp_path_factory):
    return run(evaluated, ranks=1, folder=tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_damaged_images_are_left_out_where_the_decoder_trains(evaluated, alone, tmp_path, name):
    ranks, layout = LAYOUTS[name]
    steps, metrics = run(evaluated, *layout, ranks=ranks, folder=tmp_path)
    expected, metrics_alone = alone
    assert same(steps, expected), (steps, expected)
    assert metrics["bad_samples"] == metrics_alone["bad_samples"]
    assert metrics["bad_samples"]["pixels"] > 1
    assert metrics["valid_loss"] == pytest.approx(metrics_alone["valid_loss"], rel=2e-5)


def test_damaged_images_in_packs(evaluated, tmp_path):
    """A pack has several samples, and one replica of the encoder makes all of it."""
    packed = (
        *("--packing", "--packing-look-ahead", "4", "--seq-length", "160"),
        *("--micro-batch-size", "1", "--global-batch-size", "4"),
    )
    (tmp_path / "alone").mkdir()
    expected, metrics_alone = run(evaluated, *packed, ranks=1, folder=tmp_path / "alone")
    layout = (*packed, *lies(2, dp=2))
    steps, metrics = run(evaluated, *layout, ranks=4, folder=tmp_path)
    assert same(steps, expected), (steps, expected)
    assert metrics["bad_samples"] == metrics_alone["bad_samples"]
    assert metrics["bad_samples"]["pixels"] > 1


def test_who_encodes_alone_has_one_pool_a_stream_whatever_the_decoder_s_replicas(evaluated):
    """Of training and of validation."""
    layout = (*lies(2), "--num-workers", "1")
    *_, encoder = run_ranks(processes, 3, flags=[*evaluated, *layout], timeout=180.0)
    assert encoder == 2


def processes(rank: int, *, flags: list[str]) -> int:
    """How many a rank has at most, when a run ends."""
    found, close = [], MicrobatchLoader.close

    def closing(self: MicrobatchLoader) -> None:
        found.append(len(active_children()))
        close(self)

    MicrobatchLoader.close = closing
    steps_of(rank, flags=flags)
    return max(found)


def test_who_encodes_alone_tokenizes_nothing_with_an_index(evaluated, alone, demo, tmp_path):
    settings, flags = (
        settings_of(demo / "processor", access=RowAccess(media_root=demo)),
        [*evaluated],
    )
    for number, flag in enumerate(evaluated):
        if flag in ("--train-data-path", "--valid-data-path"):
            path = shutil.copy(evaluated[number + 1], tmp_path / f"{number}.jsonl")
            flags[number + 1] = str(path)
            index([str(path)], settings, processes=1)
    assert same(train(flags, *lies(2), ranks=3, function=tokenless_steps), alone[0])


def tokenless_steps(rank: int, *, flags: list[str]):
    """What a run's steps are where the last rank cannot tokenize."""
    if rank == 2:
        dataset.tokenize_conversation = None
    return steps_of(rank, flags=flags)
