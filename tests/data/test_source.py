"""Steps of a source, and what becomes of them: numbers, who encodes what, one object a chunk."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_units import ENCODER, image_units, media_of, owner_of, planned_whole, unit_of
from local_loader import loaded_here

from loongplug.data import loader
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import ALL_TEXT, Share, TextNeeds
from loongplug.data.planned_media import (
    Assignment,
    EncoderUnits,
    LoadedUnit,
    MediaBatch,
    PlannedMicrobatch,
    PlannedUnit,
)
from loongplug.data.sample import BadSample, Grid, Sample
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.data.workers import WorkerSettings

pytestmark = pytest.mark.quick

# Steps of 8 microbatches of 1.
EIGHT: dict[str, Any] = {"sizes": StepSizes.constant(16), "micro_batch_size": 1}
GROWS = StepSizes(sizes=((0, 2), (5, 6)))  # steps of 1, 1, 1, 3, 3 microbatches of 2


@pytest.fixture
def dataset(processor, write_rows, write_image, row) -> ChatDataset:
    """Eight rows with none, one or two images."""
    images = [write_image(f"{n}.png", height=32, width=32 * n, seed=n) for n in (1, 2)]
    rows = [row("Read.", str(n), images=tuple(images[: n % 3])) for n in range(8)]
    return ChatDataset(write_rows(*rows), processor=processor, seq_length=32, training_phase="sft")


def loaded_by(unit: PlannedUnit) -> Any:
    """What loads a unit that one replica encodes, here or not."""
    (share,) = unit.shares
    return share.load


def source(dataset: ChatDataset, **options: Any) -> LocalSource:
    defaults: dict[str, Any] = {
        "sizes": GROWS,
        "micro_batch_size": 1,
        "parts": {1: None},
        "dp_size": 2,
    }
    return LocalSource(dataset, **defaults | {"seed": 5, "encoders": image_units()} | options)


def loader_of(source: Any, dataset: ChatDataset, **options: Any) -> MicrobatchLoader:
    ids = {ENCODER: dataset.processor.places("image", "video")}
    defaults: dict[str, Any] = {"processor": dataset.processor, "seq_length": 32, "token_ids": ids}
    defaults["deliveries"] = dict.fromkeys(options.get("token_ids", ids), loaded_here(dataset))
    return MicrobatchLoader(source, **defaults | options)


def reads_of(dataset: ChatDataset) -> list[int]:
    """The rows whose text is read from now on."""
    read: list[int] = []
    text_parts = dataset.text_parts
    dataset.text_parts = lambda indices: read.extend(indices) or text_parts(indices)
    return read


def numbers(steps: int, source: LocalSource) -> list[list[int]]:
    return [[planned.number for planned in source.next_step()] for _ in range(steps)]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_microbatch_has_its_number_in_its_step(dataset, processes):
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
    each = loader_of(source(dataset), dataset)
    assert [next(each).number for _ in range(6)] == [0, 0, 0, 0, 1, 2]


def test_each_replica_in_turn_from_a_step_s_first_microbatch_on(dataset):
    """Without reading the text of a step before its first microbatch is asked for."""
    read = reads_of(dataset)
    encoders = image_units(assignment=Assignment(replicas=2), loads=(1,))
    steps = source(dataset, encoders=encoders, consumed_samples=6)
    step = steps.next_step()
    assert owner_of(unit_of(next(step))) == 0
    assert len(read) == 1
    rest = list(step)
    assert [owner_of(unit_of(planned)) for planned in rest] == [1, 0]
    assert [loaded_by(unit_of(planned)) is None for planned in rest] == [False, True]
    step = steps.next_step()
    assert [owner_of(unit_of(planned)) for planned in step] == [0, 1, 0]


def last_to_the_first(media: Sequence[Sequence[Grid]], *, replicas: int) -> list[tuple[Share, ...]]:
    """The last medium of each unit with several to replica 0, the others to the last replica."""
    last = Share(encoder_replica=replicas - 1)
    return [
        (
            replace(last, media=tuple(range(len(grids) - 1))),
            Share(media=(len(grids) - 1,), encoder_replica=0),
        )
        if len(grids) > 1
        else (last,)
        for grids in media
    ]


def test_what_is_left_at_a_step_s_end_is_shared(dataset):
    """Its text is read together, and not before the others are taken."""
    read = reads_of(dataset)
    encoders = image_units(assignment=Assignment(replicas=3, by_cost=last_to_the_first))
    step = source(dataset, encoders=encoders, **EIGHT).next_step()
    assert [owner_of(unit_of(next(step))) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert len(read) == 6
    next(step)
    assert len(read) == 8


@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_planned_together_is_compared_before_any_of_it_is_given(dataset, processes):
    """Also of what is read ahead, in the order of the replica's microbatches; here in the end."""
    compared: list[tuple[int, tuple[Sample, ...]]] = []

    def same(replica: int, index: int, samples: tuple[Sample, ...], begins: None) -> None:
        assert replica == 1
        compared.append((index, samples))
        if index == 11:
            raise ValueError("rows differ")

    encoders = image_units(assignment=Assignment(replicas=3, by_cost=last_to_the_first))
    steps = source(
        dataset,
        encoders=encoders,
        same=same,
        workers=WorkerSettings(processes=processes),
        **EIGHT,
    )
    given = []

    def taken() -> None:
        for planned in chain(steps.next_step(), steps.next_step()):
            given.append(planned.samples)
            assert len(compared) >= (8 if planned.number >= 6 else len(given))
            for share in unit_of(planned).shares:
                if share.load is not None:
                    share.load()

    with pytest.raises(ValueError, match="rows differ"):
        taken()
    steps.close()
    assert [index for index, _ in compared] == [*range(12)]
    assert len(given) >= 4
    places = [[sample.where for sample in samples] for _, samples in compared]
    assert places[: len(given)] == [[sample.where for sample in samples] for samples in given]


def test_each_medium_of_a_shared_unit_is_loaded_once_where_it_is_encoded(dataset):
    assignment = Assignment(replicas=9, by_cost=last_to_the_first)
    found = [
        list(
            source(
                dataset, encoders=image_units(assignment=assignment, loads=(replica,)), **EIGHT
            ).next_step()
        )
        for replica in (0, 8)
    ]
    shared = 0
    for whole, first, last in zip(source(dataset, **EIGHT).next_step(), *found, strict=True):
        expected = loaded_by(unit_of(whole))().rows
        loaded = [
            (share.media, share.load().rows)
            for each in (last, first)
            for share in unit_of(each).shares
            if share.load is not None
        ]
        shared += len(loaded) > 1
        assert torch.equal(torch.cat([rows for _, rows in loaded]), expected)
        assert sum((media.media for media, _ in loaded), ()) == unit_of(whole).media.media
        assert all(media.rows == len(rows) for media, rows in loaded)
        shares = [[each.share for each in unit_of(one).shares] for one in (first, last)]
        assert shares[0] == shares[1]
    assert shared > 0


def test_chunks_share_the_text_that_they_consume(dataset):
    """Whichever asks first; pixels are the first chunk's."""
    needs = [TextNeeds.of_stage(first=first, last=not first, balances=False) for first in (1, 0)]
    both = loader_of(source(dataset), dataset, needs=needs)
    (alone,) = loader.collate(
        next(source(dataset).next_step()).samples, pad_token_id=0, seq_length=32
    )
    last, first = next(both.chunk(1)), next(both.chunk(0))
    assert first.position_ids is last.position_ids
    assert torch.equal(first.position_ids, alone.position_ids)
    assert (first.labels, first.loss_mask, last.input_ids) == (None,) * 3
    assert unit_of(first).media is not None
    assert unit_of(last) == replace(unit_of(first), media=None)
    assert torch.equal(first.input_ids, alone.input_ids)
    assert torch.equal(last.labels, alone.labels)
    assert torch.equal(last.loss_mask, alone.loss_mask)
    again = [next(both.chunk(index)) for index in (0, 0, 1, 1)]
    assert [each.tokens for each in again[:2]] == [each.tokens for each in again[2:]]


@pytest.fixture
def mixed(processor, write_rows, write_image) -> ChatDataset:
    """Eight rows: with an image, a video, both in either order, or none."""
    image = {"type": "image", "image": write_image("a.png", height=32, width=32)}
    frames = [write_image(f"f{n}.png", height=32, width=64, seed=n) for n in (1, 2)]
    film = {"type": "video", "video": frames, "fps": 2}
    said = {"type": "text", "text": "Look."}
    answer = {"role": "assistant", "content": "So."}
    rows = [
        {"messages": [{"role": "user", "content": [*media, said]}, answer]}
        for media in ([image], [film], [film, image], [image, film, image], []) * 2
    ]
    return ChatDataset(
        write_rows(*rows[:8]), processor=processor, seq_length=96, training_phase="sft"
    )


FILMS = "films"  # an encoder of videos, behind one of images


def apart(**options: dict[str, Any]) -> dict[str, EncoderUnits]:
    """Two encoders, each with ``options`` of its own."""
    kinds = {ENCODER: ("image",), FILMS: ("video",)}
    return {name: EncoderUnits(kinds=each, **options.get(name, {})) for name, each in kinds.items()}


def steps_of(source: LocalSource, count: int = 5) -> list[PlannedMicrobatch]:
    return [planned for _ in range(count) for planned in source.next_step()]


def test_each_encoder_has_the_media_of_its_kinds(mixed):
    """Together they have what one that takes all has, in the order of the text."""
    seen = {ENCODER: 0, FILMS: 0}
    for planned, whole in zip(
        steps_of(source(mixed, encoders=apart())), steps_of(source(mixed)), strict=True
    ):
        all_of_it, rows = unit_of(whole).media, loaded_here(mixed)(unit_of(whole))[0].rows
        pieces = rows.split([prod(grid) for grid in all_of_it.grids])
        for name, kind in ((ENCODER, "image"), (FILMS, "video")):
            unit = planned.units[name]
            chosen = [n for n, each in enumerate(all_of_it.extents) if each.kind == kind]
            assert unit.media.encoder == name
            assert unit.media.index == all_of_it.index
            assert unit.media.media == tuple(all_of_it.media[n] for n in chosen)
            found = loaded_here(mixed)(unit)[0].rows
            assert torch.equal(found, torch.cat([rows[:0], *(pieces[n] for n in chosen)]))
            assert unit.media.rows == len(found)
            seen[name] += len(chosen)
    assert all(seen.values())


@pytest.mark.parametrize("processes", [0, 1])
def test_units_are_loaded_in_any_order(mixed, processes):
    steps = source(mixed, encoders=apart(), workers=WorkerSettings(processes=processes))
    expected = source(mixed, encoders=apart())
    try:
        found, others = steps_of(steps, 4), steps_of(expected, 4)
        for mine, theirs in reversed(list(zip(found, others, strict=True))):
            for name in (FILMS, ENCODER):
                rows = [loaded_by(each.units[name])().rows for each in (mine, theirs)]
                assert torch.equal(*rows)
    finally:
        steps.close()


@pytest.mark.parametrize("planned", [False, True])
def test_each_encoder_s_units_are_assigned_and_loaded_apart(mixed, planned):
    """By costs of a whole step, or by a plan that may leave one alone; the other's take turns."""
    asked: list[list[Sequence[Grid]]] = []

    def by_cost(media: Sequence[Sequence[Grid]], *, replicas: int = 3) -> list[tuple[Share, ...]]:
        asked.append(list(media))
        return [(Share(encoder_replica=replicas - 1),)] * len(media)

    def shares(grids: Sequence[Sequence[Grid]]) -> list[tuple[Share, ...]] | None:
        return by_cost(grids) if len(grids) > 1 else asked.append(list(grids))

    how: Any = {"by_cost": by_cost, "whole_steps": True}
    how = {"by_plan": SimpleNamespace(shares=shares)} if planned else how
    encoders = apart(
        image_encoder={"assignment": Assignment(replicas=2), "loads": (1,)},
        films={"assignment": Assignment(replicas=3, **how), "loads": (0,)},
    )
    steps = source(mixed, encoders=encoders)
    found = steps_of(steps)
    assert [len(each) for each in asked] == [1, 1, 1, 3, 3]
    films, images = ([each.units[name] for each in found] for name in (FILMS, ENCODER))
    assert [grids for each in asked for grids in each] == [unit.media.grids for unit in films]
    owners = [0 if planned and number < 3 else 2 for number in range(9)]
    assert [owner_of(unit) for unit in films] == owners
    assert [loaded_by(unit) is not None for unit in films] == [owner == 0 for owner in owners]
    assert [owner_of(unit) for unit in images] == [each.number % 2 for each in found]
    assert [loaded_by(unit) is not None for unit in images] == [each.number == 1 for each in found]
    loaded = [each() for each in map(loaded_by, [*films, *images]) if each is not None]
    assert len(loaded) == owners.count(0) + 2
    assert steps.decoded == sum(each.decoded for each in loaded) > 0


def test_a_microbatch_knows_the_places_of_each_encoder_s_tokens(mixed):
    processor = mixed.processor
    ids = {name: processor.places(*each.kinds) for name, each in apart().items()}
    assert ids == {ENCODER: processor.places("image"), FILMS: processor.places("video")}
    assert ids[ENCODER] != ids[FILMS]
    encoders = apart(films={"assignment": Assignment(replicas=2), "loads": (1,)})
    each = loader_of(
        source(mixed, encoders=encoders),
        mixed,
        seq_length=96,
        token_ids=ids,
        needs=(ALL_TEXT,) * 2,
        deliveries={ENCODER: loaded_here(mixed), FILMS: loaded_here(mixed, replica=1)},
    )
    for _ in range(6):
        first, later = next(each.chunk(0)), next(each.chunk(1))
        assert list(first.units) == list(later.units) == [ENCODER, FILMS]
        for name, unit in first.units.items():
            (expected,) = np.isin(first.input_ids.numpy()[0], ids[name]).nonzero()
            (places,) = unit.places
            assert places.tolist() == expected.tolist()
            assert unit.rows == 4 * unit.tokens
            assert replace(unit, media=None) == later.units[name]
        assert media_of(first).grids.tolist() == [list(grid) for grid in unit_of(first).grids]
        films = first.units[FILMS]
        assert owner_of(films) == first.number % 2
        assert (films.media is None) == (owner_of(films) == 0)


def test_a_sample_with_bad_media_for_either_encoder_teaches_nothing(mixed):
    (planned,) = source(mixed, sizes=StepSizes.constant(6), micro_batch_size=3).next_step()

    def with_bad(name: str, number: int) -> PlannedUnit:
        media = MediaBatch.of(0, range(3), planned.extents, encoder=name, kinds=("image", "video"))
        bad = {number: BadSample(kind="pixels", message="of noise")}
        rows = torch.zeros(media.loaded_rows, 3 * 16**2, dtype=torch.uint8)
        loaded = LoadedUnit(rows=rows, bad=bad, decoded=0)
        return planned_whole(media, lambda: loaded)

    damaged = replace(planned, units={ENCODER: with_bad(ENCODER, 0), FILMS: with_bad(FILMS, 2)})
    remote: Any = SimpleNamespace(next_step=lambda: iter([damaged]))
    made = next(loader_of(remote, mixed, seq_length=96, token_ids={ENCODER: (), FILMS: ()})).heard()
    assert made.loss_mask is not None
    assert made.loss_mask.any(dim=1).tolist() == [False, True, False]
