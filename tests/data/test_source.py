"""Steps of a source, and what becomes of them: numbers, who encodes what, one object a chunk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_loader import local_loader

from loongplug.data import loader
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch, TextNeeds
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.source import Assignment, LocalSource, PlannedMicrobatch
from loongplug.data.step_sizes import StepSizes
from loongplug.data.workers import WorkerSettings
from loongplug.platform import current_platform
from loongplug.training.forward_step import ForwardStep

pytestmark = pytest.mark.quick

GROWS = StepSizes(sizes=((0, 2), (5, 6)))  # steps of 1, 1, 1, 3, 3 microbatches of 2


@pytest.fixture
def dataset(
    processor: Processor, write_rows: Callable[..., Path], write_image: Callable[..., str], row: Any
) -> ChatDataset:
    """Eight rows with none, one or two images."""
    images = [write_image(f"{n}.png", height=32, width=32 * n, seed=n) for n in (1, 2)]
    rows = [row("Read.", str(n), images=tuple(images[: n % 3])) for n in range(8)]
    return ChatDataset(write_rows(*rows), processor=processor, seq_length=32, training_phase="sft")


def source(dataset: ChatDataset, **options: Any) -> LocalSource:
    defaults = {"sizes": GROWS, "micro_batch_size": 1, "dp_rank": 1, "dp_size": 2, "seed": 5}
    return LocalSource(dataset, **defaults | options)


def numbers(steps: int, source: LocalSource) -> list[list[int]]:
    return [[planned.number for planned in source.next_step()] for _ in range(steps)]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_microbatch_has_its_number_in_its_step(dataset: ChatDataset, processes: int) -> None:
    workers = WorkerSettings(processes=processes)
    expected = [[0], [0], [0], [0, 1, 2], [0, 1, 2]]
    whole = source(dataset, workers=workers)
    resumed = source(dataset, workers=workers, consumed_samples=4)
    try:
        assert numbers(5, whole) == expected
        assert numbers(3, resumed) == expected[2:]
    finally:
        whole.close()
        resumed.close()
    each = MicrobatchLoader(source(dataset), processor=dataset.processor, seq_length=32)
    assert [next(each).number for _ in range(6)] == [0, 0, 0, 0, 1, 2]


def test_each_replica_in_turn_from_a_step_s_first_microbatch_on(dataset: ChatDataset) -> None:
    """Without reading the text of a step before its first microbatch is asked for."""
    read: list[int] = []
    text_parts = dataset.text_parts
    dataset.text_parts = lambda indices: read.extend(indices) or text_parts(indices)
    steps = source(dataset, assignment=Assignment(replicas=2), loads=(1,), consumed_samples=6)
    step = steps.next_step()
    assert next(step).units["image_encoder"].encoder_replica == 0
    assert len(read) == 1
    rest = list(step)
    assert [planned.units["image_encoder"].encoder_replica for planned in rest] == [1, 0]
    assert [planned.units["image_encoder"].load is None for planned in rest] == [False, True]
    assert [planned.units["image_encoder"].encoder_replica for planned in steps.next_step()] == [
        0,
        1,
        0,
    ]


def test_costs_are_compared_over_the_steps(dataset: ChatDataset) -> None:
    asked: list[list[int]] = []

    def by_cost(media: Sequence[Sequence[Grid]], *, replicas: int) -> list[int]:
        asked.append([len(grids) for grids in media])
        return [replicas - 1] * len(media)

    steps = source(dataset, assignment=Assignment(replicas=3, by_cost=by_cost), loads=(2,))
    found = [planned for _ in range(4) for planned in steps.next_step()]
    assert [len(each) for each in asked] == [1, 1, 1, 3]
    assert [count for each in asked for count in each] == [len(each.media.media) for each in found]
    assert {each.units["image_encoder"].encoder_replica for each in found} == {2}


def test_pixels_are_loaded_when_they_are_asked_for(dataset: ChatDataset) -> None:
    steps = source(dataset, consumed_samples=6)
    step = list(steps.next_step())
    assert steps.decoded == 0
    for planned in step:
        assert planned.units["image_encoder"].load is not None
        loaded = planned.units["image_encoder"].load()
        assert len(loaded.rows) == planned.units["image_encoder"].media.rows
    assert steps.decoded > 0


class Model(torch.nn.Module):
    """Stands in for a chunk."""

    pre_process = True

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.vision = kwargs["vision"]
        return torch.ones(2, 32)


def test_one_object_from_its_making_to_the_loss(
    dataset: ChatDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Microbatch] = []
    ended: list[Microbatch] = []
    collate = loader.collate

    def collated(*args: Any, **options: Any) -> tuple[Microbatch, ...]:
        made.extend(collate(*args, **options))
        return (made[-1],)

    monkeypatch.setattr(loader, "collate", collated)
    init = Microbatch.__init__
    inits: list[int] = []
    monkeypatch.setattr(
        Microbatch, "__init__", lambda self, **values: inits.append(1) or init(self, **values)
    )
    step = ForwardStep(current_platform(), on_loss=lambda each, _: ended.append(each))
    model, microbatches = Model(), local_loader(dataset, micro_batch_size=2)
    for _ in range(3):
        output, loss = step(microbatches.chunk(0), model)
        loss(output)
        assert model.vision is made[-1].vision
    assert len(made) == len(inits) == 3
    assert all(one is other for one, other in zip(made, ended, strict=True))


def test_chunks_share_the_text_that_they_consume(dataset: ChatDataset) -> None:
    """Whichever asks first; pixels are the first chunk's."""
    needs = [TextNeeds.of_stage(first=first, last=not first, balances=False) for first in (1, 0)]
    both = MicrobatchLoader(
        source(dataset), processor=dataset.processor, seq_length=32, needs=needs
    )
    (alone,) = loader.collate(
        next(source(dataset).next_step()).samples, pad_token_id=0, seq_length=32
    )
    last, first = next(both.chunk(1)), next(both.chunk(0))
    assert first.position_ids is last.position_ids
    assert torch.equal(first.position_ids, alone.position_ids)
    assert (first.labels, first.loss_mask, last.input_ids, last.units["image_encoder"].media) == (
        None,
    ) * 4
    assert torch.equal(first.input_ids, alone.input_ids)
    assert torch.equal(last.labels, alone.labels)
    assert torch.equal(last.loss_mask, alone.loss_mask)
    assert first.units["image_encoder"].media is not None
    again = [next(both.chunk(index)) for index in (0, 0, 1, 1)]
    assert [each.tokens for each in again[:2]] == [each.tokens for each in again[2:]]


def test_a_loader_takes_any_source(dataset: ChatDataset) -> None:
    """One that gets its steps from elsewhere, here a list."""
    local = source(dataset, loads=())
    steps: list[list[PlannedMicrobatch]] = [list(local.next_step()) for _ in range(4)]
    remote: Any = SimpleNamespace(next_step=lambda: iter(steps.pop(0)))
    pixels = torch.zeros(1, 1536)

    def deliver(planned: PlannedMicrobatch) -> tuple[torch.Tensor, tuple[int, ...]]:
        return pixels.expand(planned.units["image_encoder"].media.rows, -1), ()

    each = MicrobatchLoader(remote, processor=dataset.processor, seq_length=32, deliver=deliver)
    expected = MicrobatchLoader(source(dataset), processor=dataset.processor, seq_length=32)
    for _ in range(6):
        one, other = next(each), next(expected)
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.units["image_encoder"].media is not None
        assert other.units["image_encoder"].media is not None
        assert torch.equal(
            one.units["image_encoder"].media.grids, other.units["image_encoder"].media.grids
        )
