"""What is done ahead of a step: plans by background processes, and media up to a bound."""

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_units import ENCODER, image_units, unit_of
from local_loader import local_source
from surveyed import indexed

from loongplug.data.dataset import ChatDataset
from loongplug.data.media_loader import UnitLoader
from loongplug.data.microbatch import Share
from loongplug.data.planned_media import Assignment, LoadedUnit, MediaBatch, PlannedMicrobatch
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.data.workers import Ordered, Pool, ProcessDiedError, WorkerSettings
from loongplug.hetero.bubble_planner import StepPlanner

pytestmark = pytest.mark.quick

STEPS, STEP = 4, 8  # microbatches of a step


@pytest.fixture(params=[True, False], ids=["indexed", "unindexed"])
def dataset(request, processor, write_rows, write_image, row) -> ChatDataset:
    """A row for each microbatch, with one to four images."""
    names = [write_image(f"{n}.png", height=32, width=32 * n, seed=n) for n in (1, 2, 3, 4)]
    draws = Random(7)  # no step is like another
    counts = [draws.randint(1, 4) for _ in range(STEPS * STEP)]
    rows = [row("Read", str(n), images=tuple(names[:each])) for n, each in enumerate(counts)]
    data = ChatDataset(write_rows(*rows), processor=processor, seq_length=64, training_phase="sft")
    return indexed(data) if request.param else data


class Planner(StepPlanner):
    """Gives units to two replicas in turn; notes which process makes a plan."""

    def __init__(self, noted: Path) -> None:
        super().__init__(None, stages=[0, 1])
        self._noted = noted

    def _planned(self, units: Any) -> Any:
        with self._noted.open("a") as file:
            file.write(f"{os.getpid()}\n")
        owners = (Share(encoder_replica=number % 2) for number in range(len(units)))
        return SimpleNamespace(shares=tuple((owner,) for owner in owners))


def source(dataset: ChatDataset, *, workers: WorkerSettings, planner: Any = None) -> LocalSource:
    replicas = 1 if planner is None else 2
    assignment = Assignment(replicas=replicas, by_plan=planner)
    return local_source(
        dataset,
        sizes=StepSizes.constant(STEP),
        micro_batch_size=1,
        encoders=image_units(assignment=assignment, loads=range(replicas)),
        workers=workers,
    )


def test_plans_are_made_in_the_background_and_kept(dataset, tmp_path):
    """As they are made here, and none is made again, also when the step is encoded."""
    noted = tmp_path / "plans"
    planner, here = Planner(noted), Planner(tmp_path / "here")
    ahead = source(dataset, workers=WorkerSettings(processes=1), planner=planner)
    in_process = source(dataset, workers=WorkerSettings(), planner=here)
    for _ in range(STEPS):
        steps = [list(each.next_step()) for each in (ahead, in_process)]
        shares, expected = ([[x.share for x in unit_of(m).shares] for m in step] for step in steps)
        assert shares == expected
        units = [unit_of(each).media.grids for each in steps[0]]
        plan = planner.plan(units)  # who encodes asks, too
        assert plan == here.plan(units)
    ahead.close()
    made = noted.read_text().split()
    assert len(made) >= STEPS
    assert str(os.getpid()) not in made
    assert (tmp_path / "here").read_text().split() == [str(os.getpid())] * STEPS


def taken(step: Sequence[PlannedMicrobatch]) -> Iterator[LoadedUnit]:
    return (x.load() for each in step for x in unit_of(each).shares if x.load is not None)


def test_media_are_loaded_ahead_up_to_a_number_of_bytes(dataset, monkeypatch):
    """Of what waits for its use; one unit may go beyond, and each is loaded in the end."""
    begun: list[MediaBatch] = []
    submit = Pool.submit

    def submitted(self: Any, job: Any, **how: Any) -> Any:
        if isinstance(job, MediaBatch):
            begun.append(job)
        return submit(self, job, **how)

    monkeypatch.setattr(Pool, "submit", submitted)
    monkeypatch.setattr(Ordered, "made", lambda self, number: True)  # texts come in time
    whole = source(dataset, workers=WorkerSettings())
    expected = [loaded.rows for _ in range(2) for loaded in taken(list(whole.next_step()))]
    counts = []
    for most in (0, 6 * 768 * 8, 2**30):
        begun.clear()
        workers = WorkerSettings(processes=1, most_bytes=most)
        bounded = source(dataset, workers=workers)
        bytes_of = bounded._bytes_of
        step = list(bounded.next_step())
        waiting = list(map(bytes_of, begun))
        assert sum(waiting[:-1]) <= most
        counts.append(len(begun))
        used = 0
        rows = []
        for _ in range(2):
            for loaded in taken(step):
                rows.append(loaded.rows)
                used += loaded.rows.nbytes
                waiting = list(map(bytes_of, begun))
                assert sum(waiting[:-1]) - used <= most
            step = list(bounded.next_step())
        bounded.close()
        assert all(torch.equal(*each) for each in zip(rows, expected, strict=True))
        assert len({each.index for each in begun}) == len(begun)
    assert counts[0] == 1
    assert counts[0] < counts[1] < counts[2] == 2 * STEP  # the next step's, too
    assert ENCODER in {each.encoder for each in begun}


@pytest.mark.parametrize("streams", [False, True])
def test_a_pass_waits_for_its_own_media_alone(dataset, tmp_path, monkeypatch, streams):
    """All others are held back until its own were taken; and nobody holds what was taken."""
    gate, noted = tmp_path / "gate", tmp_path / "loaded"
    load = UnitLoader.__call__

    def held_back(self: UnitLoader, unit: MediaBatch) -> LoadedUnit:
        until = time.monotonic() + 20
        while unit.index and not gate.exists() and time.monotonic() < until:
            time.sleep(0.01)
        with noted.open("a") as file:
            file.write(f"{unit.index}\n")
        return load(self, unit)

    monkeypatch.setattr(UnitLoader, "__call__", held_back)
    planner = Planner(tmp_path / "plans") if streams else None
    ahead = source(dataset, workers=WorkerSettings(processes=1), planner=planner)
    step = ahead.next_step()
    first = next(step)
    rows = [weakref.ref(loaded.rows) for loaded in taken([first])]
    assert set(noted.read_text().split()) == {"0"}
    gate.touch()
    units = [loaded.rows for loaded in taken(list(step))]
    assert len(units) >= STEP - 1
    gc.collect()
    assert [each() for each in rows] == [None] * len(rows)
    ahead.close()


@pytest.mark.parametrize("packed", [False, True])
def test_a_text_waits_for_no_later_one(dataset, tmp_path, monkeypatch, packed):
    """Without an index, texts say what is planned ahead: as far as they are made."""
    gate, made = tmp_path / "gate", ChatDataset.text_parts

    def held_back(self: ChatDataset, rows: Sequence[int]) -> Any:
        until = time.monotonic() + 60
        while min(rows) >= 16 and not gate.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return made(self, rows)

    monkeypatch.setattr(ChatDataset, "text_parts", held_back)
    options: dict[str, Any] = {"look_ahead": 1, "sizes": StepSizes.constant(1)} if packed else {}
    workers = WorkerSettings(processes=1)
    defaults = {"sizes": StepSizes.constant(STEP), "encoders": image_units(loads=range(1))}
    ahead = local_source(dataset, micro_batch_size=1, workers=workers, **defaults | options)
    assert next(ahead.next_step()).samples
    assert not gate.exists()
    gate.touch()
    ahead.close()


def test_a_killed_process_is_what_every_load_tells(dataset):
    """Also those that were to begin behind it."""
    ahead = source(dataset, workers=WorkerSettings(processes=1, most_bytes=0))
    step = list(ahead.next_step())
    (pid,) = (process.pid for process in ahead._pool._processes)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    told = []
    for share in (share for each in step for share in unit_of(each).shares):
        try:
            share.load()
        except Exception as error:
            told.append(error)
    assert len(told) >= STEP - 2  # what it had made is there
    assert {type(each) for each in told} == {ProcessDiedError}


def test_a_plan_that_is_kept_again_is_the_last_to_go(tmp_path):
    planner = Planner(tmp_path / "plans")
    steps = [(((1, 2, 2 * n),),) for n in range(1, 35)]
    for step in (*steps[:31], steps[0], *steps[31:]):
        planner.keep(step, None)
    assert steps[0] in planner._plans
    assert len(planner._plans) == 32
