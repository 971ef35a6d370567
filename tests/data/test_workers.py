"""Background processes: order, bounds, errors, death."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from multiprocessing import popen_fork
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from eventually import eventually
from local_loader import local_loader, require_alike

from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.workers import IN_PROCESS, Ordered, Pool, WorkerSettings

TWO = WorkerSettings(processes=2, depth=2)


@pytest.fixture
def background() -> Iterator[Callable[..., Ordered[Any, Any]]]:
    """What a function makes of items, from a pool that ends with the test."""
    made: list[Pool[Any, Any]] = []

    def make(function: Callable[[Any], Any], items: Iterator[Any]) -> Ordered[Any, Any]:
        made.append(Pool(function, settings=TWO))
        return made[-1].ordered(items)

    yield make
    for each in made:
        each.close()


def uneven(item: int) -> tuple[int, int]:
    """The first of each pair takes longer, so that results are ready out of order."""
    time.sleep(0.02 * (item % 2 == 0))
    return item, os.getpid()


class WithThreads:
    """Like a video's decoder that is done with, in a cycle: to be freed where its threads are."""

    def __init__(self, freed: Path) -> None:
        self.itself, self.freed = self, freed

    def __del__(self) -> None:
        (self.freed / str(os.getpid())).touch()


def collecting(_: int) -> int:
    gc.collect()
    return os.getpid()


@pytest.mark.parametrize("frozen_before", [False, True])
def test_what_this_process_made_is_not_freed_in_another(background, tmp_path, frozen_before):
    gc.disable()  # else it may be freed before there are others
    gc.freeze()
    frozen = gc.get_freeze_count()
    if not frozen_before:
        gc.unfreeze()
    try:
        WithThreads(tmp_path)
        results = background(collecting, count())
        assert os.getpid() not in {next(results) for _ in range(4)}
        assert list(tmp_path.iterdir()) == []
        assert (gc.get_freeze_count() >= frozen) == frozen_before
        gc.unfreeze()
        gc.collect()
        assert [each.name for each in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        gc.unfreeze()
        gc.enable()


def test_only_so_much_runs_ahead(background):
    taken: list[int] = []
    results = background(uneven, (taken.append(each) or each for each in count()))
    assert taken == []  # nothing before the first is asked for
    for number in range(1, 8):
        next(results)
        time.sleep(0.05)
        assert len(taken) <= number + TWO.processes * TWO.depth


def fails(item: int) -> int:
    if item == 3:
        raise ValueError("rows.jsonl:3: no good")
    if item == 5:
        raise KeyError("a bug")
    return item


def test_an_error_comes_with_its_own_words_at_its_own_place(background):
    results = background(fails, count())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"^rows\.jsonl:3: no good$"):
        next(results)
    assert next(results) == 4
    with pytest.raises(RuntimeError, match=r"KeyError: 'a bug'\n(.|\n)*in fails"):
        next(results)


def drain(results: Iterator[Any], *, kill: int | None = None) -> None:
    if kill is not None:
        os.kill(kill, signal.SIGKILL)
    for _ in range(20):
        next(results)


def dies(item: int) -> int:
    if item == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def breaks(error: Exception) -> Iterator[int]:
    yield from range(3)
    raise error


@pytest.mark.parametrize("error", [OSError("disk gone"), RuntimeError("no plan"), KeyError("x")])
def test_what_the_items_raise_comes_as_it_is(background, error):
    results = background(uneven, breaks(error))
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(type(error)) as caught:
        next(results)
    assert caught.value is error


@pytest.mark.parametrize("items", [count(), iter(range(5))])
def test_a_death_is_told_as_often_as_is_asked(background, items):
    results = background(dies, items)
    for _ in range(9):
        with pytest.raises(RuntimeError, match=r"data loading process has died.*--num-workers"):
            drain(results)


class HalfSent:
    """Ends its process when the first of what is sent with it are on their way."""

    def __reduce__(self) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes, (10**8,)


def test_a_process_killed_as_it_sends_is_an_error(background):
    results = background(lambda _: [bytes(2 * 10**8), HalfSent()], count())
    with pytest.raises(RuntimeError, match="data loading process has died"):
        next(results)


def test_ctrl_c_comes_when_all_processes_are_there(background, monkeypatch):
    """Else it would leave one that nobody ends, or run this process's clean-up in a new one."""
    numbers, forks = (signal.SIGINT, signal.SIGTERM), []
    usual = [signal.getsignal(each) for each in numbers]

    def interrupted(self: Any, process: Any) -> None:
        forks.append(process)
        os.kill(os.getpid(), signal.SIGINT)
        launch(self, process)

    launch = popen_fork.Popen._launch
    monkeypatch.setattr(popen_fork.Popen, "_launch", interrupted)
    results = background(lambda _: [signal.getsignal(each) for each in numbers], count())
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert len(forks) == TWO.processes
    monkeypatch.undo()
    assert [signal.getsignal(each) for each in numbers] == usual
    assert next(results) == [signal.SIG_IGN, usual[1]], "Ctrl-C is for the process that asked"


def test_streams_share_a_pool():
    pool: Pool[int, Any] = Pool(uneven, settings=TWO)
    works = [pool.submit(each) for each in range(100, 106)]
    streams = pool.ordered(count()), pool.ordered(iter(range(50, 58)))
    found = [[next(each)[0] for each in streams] for _ in range(8)]
    assert found == [[each, 50 + each] for each in range(8)]
    assert [each.result()[0] for each in reversed(works)] == [*range(105, 99, -1)]
    assert len({next(streams[0])[1] for _ in range(9)} | {works[0].result()[1]}) == 2
    with pytest.raises(StopIteration):
        next(streams[1])
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(1)


def test_without_processes_each_is_made_once_when_it_is_asked_for():
    made: list[int] = []
    works = [Pool(made.append, settings=IN_PROCESS).submit(each) for each in range(3)]
    for each in (2, 1, 2):
        works[each].result()
    assert made == [2, 1]


OWNER = """
import itertools, os, sys, time
from loongplug.data.workers import Pool, WorkerSettings
def make(job):
    os.write(1, b"%d\\n" % os.getpid())  # at once, unlike print
    time.sleep(job)
others = [Pool(make, settings=WorkerSettings(processes=2)) for _ in range(2)]
works = [pool.submit(job) for job in (0, 0, 0, 999, 999) for pool in others]
for work in works[:6]:
    work.result()
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_processes_end_with_the_one_that_asked(killed):
    """However it ends, with jobs under way, and with no word of theirs."""
    owner = Popen([sys.executable, "-c", OWNER], stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert owner.stdout is not None
    pids = {int(owner.stdout.readline()) for _ in range(10)}
    assert len(pids) == 4
    if killed:
        owner.kill()
    said = owner.communicate(timeout=60)
    assert (owner.returncode, *said) == (-signal.SIGKILL if killed else 0, b"", b"")
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=30)


# The loader on top of them.


@pytest.fixture
def dataset(processor, write_rows, write_image, row, tmp_path) -> ChatDataset:
    """Twelve rows with up to three images; row 6's text is bad, and one image of row 9."""
    processor = replace(processor, special_texts=None)  # what looks like a special token is one
    images = [write_image(f"{i}.png", height=32, width=32 * i, seed=i) for i in range(1, 4)]
    rows = [row("Read.", str(i), images=tuple(images[: i % 4])) for i in range(12)]
    write_image("cut.png", height=64, width=64)
    content = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    rows[5] = row("Read <|image_pad|>", "5")
    rows[8] = row("Read.", "8", images=(images[0], "cut.png", images[1]))
    return ChatDataset(write_rows(*rows), processor=processor, seq_length=40, training_phase="sft")


def loader(dataset: ChatDataset, processes: int, **options: Any) -> MicrobatchLoader:
    defaults = {
        "micro_batch_size": 3,
        "dp_rank": 1,
        "dp_size": 2,
        "seed": 3,
        "bad_samples": BadSamples("skip"),
        "workers": WorkerSettings(processes=processes),
    }
    return local_loader(dataset, **defaults | options)


def test_microbatches_are_the_same_with_any_number_of_processes(dataset):
    alone = loader(dataset, 0)
    expected = [next(alone) for _ in range(9)]
    for processes in (1, 3):
        ahead = loader(dataset, processes)
        resumed = loader(dataset, processes, consumed_samples=24)
        try:
            found = [next(ahead) for _ in range(9)]
            rest = [next(resumed) for _ in range(5)]
        finally:
            ahead.source.close()
            resumed.source.close()
        assert ahead.source.consumed_samples == alone.source.consumed_samples == 54
        for one, other in zip([*expected, *expected[4:]], [*found, *rest], strict=True):
            require_alike(other, one)
        assert ahead.source._bad_samples.counts == alone.source._bad_samples.counts


@pytest.mark.parametrize("processes", [0, 2])
def test_a_bad_sample_is_an_error_with_file_and_line_where_it_is_used(dataset, processes):
    options = {"seed": None, "dp_rank": 0, "dp_size": 1, "micro_batch_size": 1}
    options["bad_samples"] = BadSamples("fatal")
    for consumed, good, message in (
        (0, 5, r"rows\.jsonl:6: 1 image tokens in the text for 0"),
        (7, 1, r"^\S*rows\.jsonl:9: image .*cut\.png is damaged"),
    ):
        strict = loader(dataset, processes, consumed_samples=consumed, **options)
        try:
            for _ in range(good):
                next(strict)
            with pytest.raises(ValueError, match=message):
                next(strict)
        finally:
            strict.source.close()
