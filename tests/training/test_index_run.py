"""Runs with an index, without one, and with one that does not fit."""

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import RankError, run_ranks
from surveyed import settings_of

from loongplug.data.check import index
from loongplug.data.data_options import RowAccess
from loongplug.training import datasets
from loongplug.training.arguments import parse_arguments
from loongplug.training.provider import engine_of
from loongplug.training.run import run

pytestmark = pytest.mark.slow

SAID = "An index of the extents of rows is made beside this run: "


def steps(rank: int, *, flags: list[str], waits: bool = False) -> tuple[list[Any], str]:
    """Losses, and what is printed and warned of; a run that ``waits`` trains behind its index."""
    beside = datasets.index_beside

    def waited(*values: Any) -> Any:
        pool = beside(*values)
        pool.submit(0).result()  # again, behind the first time
        return pool

    if waits:
        datasets.index_beside = waited
    warned: list[str] = []
    datasets.LOG.warning = lambda said, *values: warned.append(said % values)  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        losses = [step.loss for step in run(flags)]
    return losses, "\n".join((shown.getvalue(), *warned))


def train(flags: list[str], *more: str, waits: bool = False) -> tuple[list[Any], str]:
    (found,) = run_ranks(steps, 1, flags=[*flags, *more], waits=waits, timeout=120.0)
    return found


@pytest.fixture
def data(demo: Path, tmp_path: Path) -> Path:
    """A file of the demo's rows, without an index."""
    return Path(shutil.copy(demo / "train.jsonl", tmp_path / "rows.jsonl"))


@pytest.fixture
def short(flags: list[str], data: Path, demo: Path) -> list[str]:
    flags = [*flags, "--train-data-path", str(data), "--media-root", str(demo)]
    return [*flags, "--train-iters", "2"]


def test_a_run_makes_an_index_and_the_next_one_finds_it(
    short: list[str], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "indexes"
    folder.mkdir()
    flags = [*short, "--index-dir", str(folder)]
    expected, said = train(flags, waits=True)
    assert said.count(f"{SAID}{data}.\n") == 1
    (place,) = tmp_path.rglob("*.lengths")
    assert place.parent == folder
    before = place.stat().st_mtime_ns
    found, said = train(flags)
    assert SAID not in said
    assert found == expected
    assert place.stat().st_mtime_ns == before


def test_ranks_compare_the_index_of_each_file_by_its_name(
    short: list[str], data: Path, demo: Path
) -> None:
    settings = settings_of(demo / "processor", access=RowAccess(media_root=demo))
    index([str(data)], settings, processes=1)
    parsed = parse_arguments(short)
    engine = engine_of(parsed.args, parsed.model)
    planned = datasets.DatasetProvider(parsed.args, parsed.model, engine=engine).planned
    assert [*planned] == ["evaluation", "index of training file 1, rows.jsonl"]


@pytest.mark.parametrize("wrong", ["settings", "files"])
def test_an_index_that_does_not_fit_ends_a_packed_run_alone(
    short: list[str],
    data: Path,
    demo: Path,
    tmp_path: Path,
    wrong: str,
) -> None:
    """Others say so and go on without it."""
    expected, _ = train(short)
    for place in tmp_path.glob("*.lengths"):  # where the run had the time
        place.unlink()
    settings = settings_of(demo / "processor", access=RowAccess(media_root=demo))
    said = "settings video_fps was 3.0, is None"
    if wrong == "settings":
        index([str(data)], dataclasses.replace(settings, video_fps=3.0), processes=1)
    else:
        said = "rows bytes was "
        other = Path(shutil.copy(demo / "test.jsonl", tmp_path / "other.jsonl"))
        index([str(other)], settings, processes=1)
        Path(f"{other}.lengths").rename(f"{data}.lengths")
    packing = ("--packing", "--seq-length", "160", "--micro-batch-size", "1")
    message = rf"rows\.jsonl\.lengths is of other rows or settings \({said}.* make it again with"
    with pytest.raises(RankError, match=message):
        train(short, *packing)
    found, shown = train(short)
    assert shown.count(f"no index is used: {data}.lengths is of other rows or settings (") == 1
    assert f" ({said}" in shown
    assert f"{SAID}{data}.\n" in shown
    assert found == expected
