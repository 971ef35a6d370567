"""The rows of two encoders' units, on the ranks that encode them, and word of bad samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_units import planned_whole
from ranks import run_ranks

from loongplug.data.bad_samples import BadSample
from loongplug.data.coded_media import CodedMedia
from loongplug.data.conversation import AudioClip, Medium
from loongplug.data.microbatch import MediaInput, Share
from loongplug.data.pixel_bytes import PixelBytes
from loongplug.data.source import PlannedMicrobatch, PlannedShare, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.training.delivery import (
    LoadedElsewhere,
    News,
    ReplicaDelivery,
    deliver,
    loaded_replicas,
)

pytestmark = pytest.mark.quick

# Eyes are encoded by each rank in turn, ears by the first two together.
REPLICAS = {"eyes": ((0,), (1,), (2,)), "ears": ((0, 1),)}
VALUES = {"eyes": 3, "ears": 5}
SAMPLES = 4
# By microbatch and encoder: of each medium its rows and its sample; and which samples are bad.
UNITS = {
    (0, "eyes"): ([(2, 0), (1, 3)], {3}),
    (0, "ears"): ([(4, 1)], {1}),
    (1, "eyes"): ([(1, 2)], set()),
    (1, "ears"): ([(2, 0), (1, 2)], {0, 2}),
    (2, "eyes"): ([], set()),
    (2, "ears"): ([(3, 1)], set()),
    (3, "eyes"): ([(2, 1)], {1}),
    (3, "ears"): ([], set()),
}


def rows_of(index: int, encoder: str) -> torch.Tensor:
    """Other values in each unit."""
    media, _ = UNITS[index, encoder]
    count = sum(rows for rows, _ in media)
    start = 100.0 * index + (50 if encoder == "ears" else 0)
    return start + torch.arange(count * VALUES[encoder]).view(count, VALUES[encoder]) / 10


def planned(rank: int, index: int, order: list[tuple[int, str]]) -> PlannedMicrobatch:
    def unit(encoder: str) -> PlannedUnit:
        media, bad = UNITS[index, encoder]
        replicas = REPLICAS[encoder]
        replica = index % len(replicas)

        def load() -> LoadedUnit:
            order.append((index, encoder))
            return LoadedUnit(
                index=index,
                encoder=encoder,
                rows=rows_of(index, encoder),
                bad={number: BadSample(kind="pixels", message="of noise") for number in bad},
                decoded=len(media),
            )

        nothing: tuple[Medium, ...] = (AudioClip(Path("a.wav"), samples=1),) * len(media)
        return planned_whole(
            MediaBatch(
                index=index,
                encoder=encoder,
                media=nothing,
                grids=tuple((1, 1, rows) for rows, _ in media),
                samples=tuple(sample for _, sample in media),
                where=("rows.jsonl:1",) * len(media),
            ),
            load if replica in loaded_replicas(replicas, rank=rank) else None,
            replica=replica,
        )

    return PlannedMicrobatch(
        number=index, samples=(), units={name: unit(name) for name in REPLICAS}, begins=None
    )


def delivered(rank: int, *, news: bool) -> list[tuple[dict[str, MediaInput], set[int]]]:
    everyone, pair = dist.group.WORLD, dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(3)][rank]
    groups = {"eyes": alone, "ears": pair if rank < 2 else None}
    deliveries = {
        name: ReplicaDelivery(
            replicas,
            groups[name],
            row_values=VALUES[name],
            coded=None,
            device=torch.device("cpu"),
            news=News(group=everyone, hearers=range(3), channel=number, recent=9) if news else None,
        )
        for number, (name, replicas) in enumerate(REPLICAS.items())
    }
    order: list[tuple[int, str]] = []
    found = [deliver(deliveries, planned(rank, index, order)) for index in range(4)]
    assert order == sorted(order, key=lambda each: (each[0], list(REPLICAS).index(each[1])))
    dist.barrier()  # a rank that goes early would take word with it that others wait for
    return found


@pytest.mark.parametrize("news", [True, False])
def test_each_rank_has_the_rows_that_it_encodes_and_all_know_of_bad_samples(news: bool) -> None:
    for rank, microbatches in enumerate(run_ranks(delivered, 3, news=news)):
        for index, (media, bad) in enumerate(microbatches):
            encodes = {
                name: rank in replicas[index % len(replicas)] for name, replicas in REPLICAS.items()
            }
            assert media.keys() == {name for name, here in encodes.items() if here}
            for name, found in media.items():
                assert torch.equal(found.rows, rows_of(index, name))
            knows = {
                name
                for name, replicas in REPLICAS.items()
                if news or replicas[index % len(replicas)][0] == rank
            }
            assert bad == set().union(*(UNITS[index, name][1] for name in knows))


# Of a microbatch of three samples, rank 0 encodes the first two and rank 1 the third; ranks 2 and 3
# decode. By microbatch, the sample of each medium, and which samples are bad.
PIECES = ((0, range(2)), (1, range(2, 3)))
APART = [([0, 2, 2], {2}), ([1], {1}), ([2], set()), ([], set()), ([0, 1, 2], {0, 2})]


def unit_of_samples(index: int, samples: list[int], *, bad: set[int], loads: bool) -> PlannedUnit:
    """A medium of one row for each of ``samples``."""

    def load() -> LoadedUnit:
        sample = BadSample(kind="pixels", message="of noise")
        bad_here = dict.fromkeys(bad & {*samples}, sample)
        rows = torch.zeros(len(samples), 1)
        return LoadedUnit(index=index, encoder="eyes", rows=rows, bad=bad_here, decoded=1)

    nothing: tuple[Medium, ...] = tuple(object() for _ in samples)  # type: ignore[misc]
    media = MediaBatch(
        index=index,
        encoder="eyes",
        media=nothing,
        grids=((1, 1, 1),) * len(samples),
        samples=tuple(samples),
        where=("rows.jsonl:1",) * len(samples),
    )
    return planned_whole(media, load if loads else None)


def told_apart(rank: int) -> list[set[int]]:
    everyone = dist.group.WORLD
    assert everyone is not None
    alone = [dist.new_group([each]) for each in range(4)][rank]
    news = News(group=everyone, hearers=(2, 3), channel=1, recent=2)
    found = []
    for index, (samples, bad) in enumerate(APART):
        if rank < 2:
            own = [each for each in samples if each in PIECES[rank][1]]
            delivery = ReplicaDelivery(
                [(rank,)],
                alone,
                row_values=1,
                coded=None,
                device=torch.device("cpu"),
                news=news,
            )
            _, heard = delivery(unit_of_samples(index, own, bad=bad, loads=True))
        else:
            elsewhere = LoadedElsewhere(pieces=PIECES, news=news)
            _, heard = elsewhere(unit_of_samples(index, samples, bad=bad, loads=False))
        found.append(heard)
        kept = len(news._sends)  # two hear of each microbatch
        assert kept <= 2 * news.recent, "word of all steps is kept"
    dist.barrier()
    return found


def test_all_that_decode_hear_of_bad_samples_from_encoders_on_ranks_of_their_own() -> None:
    found = run_ranks(told_apart, 4)
    for index, (_, bad) in enumerate(APART):
        assert found[2][index] == found[3][index] == bad
        for rank, own in PIECES:
            assert found[rank][index] == bad & {*own}


# A unit of three media of one row each, of three samples; ranks 0 and 2 encode it.
SHARES = (Share(encoder_replica=2, media=(0, 2)), Share(encoder_replica=0, media=(1,)))


def delivered_shares(rank: int) -> tuple[torch.Tensor | None, list[list[int]], set[int]]:
    everyone = dist.group.WORLD
    assert everyone is not None
    alone = [dist.new_group([each]) for each in range(3)][rank]
    whole = unit_of_samples(0, [0, 1, 2], bad=set(), loads=False).media

    def planned(share: Share) -> PlannedShare:
        media = whole.part(share.media)

        def load() -> LoadedUnit:
            sample = BadSample(kind="pixels", message="of noise")
            rows = torch.tensor(share.media).unsqueeze(1) + 10.0
            bad = dict.fromkeys({1, 2} & {*media.samples}, sample)
            return LoadedUnit(index=0, encoder="eyes", rows=rows, bad=bad, decoded=1)

        return PlannedShare(
            share=share, media=media, load=load if share.encoder_replica == rank else None
        )

    delivery = ReplicaDelivery(
        [(0,), (1,), (2,)],
        alone,
        row_values=1,
        coded=None,
        device=torch.device("cpu"),
        news=News(group=everyone, hearers=range(3), channel=1, recent=2),
    )
    media, bad = delivery(PlannedUnit(media=whole, shares=tuple(map(planned, SHARES))))
    dist.barrier()
    return (None, [], bad) if media is None else (media.rows, media.grids.tolist(), bad)


def test_each_rank_has_its_share_of_a_unit_and_all_know_of_bad_samples_in_any() -> None:
    found = run_ranks(delivered_shares, 3)
    for replica, numbers in ((0, [1]), (1, None), (2, [0, 2])):
        rows, grids, bad = found[replica]
        assert bad == {1, 2}
        if numbers is None:
            assert rows is None
            continue
        assert rows.flatten().tolist() == [10.0 + number for number in numbers]
        assert grids == [[1, 1, 1]] * len(numbers)


PIXELS = PixelBytes(values=torch.arange(768.0).view(3, 256), frames=2)
BYTES = torch.arange(18, dtype=torch.uint8).view(3, 6)


def delivered_bytes(rank: int) -> tuple[torch.Tensor, list[torch.dtype]]:
    """An image's rows on both ranks of a replica, and what was sent to them."""
    sent: list[torch.dtype] = []
    broadcast = dist.broadcast

    def watched(rows: torch.Tensor, **options: Any) -> Any:
        sent.append(rows.dtype)
        return broadcast(rows, **options)

    dist.broadcast = watched
    media = MediaBatch(
        index=0,
        encoder="eyes",
        media=(Path("image.png"),),
        grids=((1, 1, 3),),
        samples=(0,),
        where=("rows.jsonl:1",),
    )

    def load() -> LoadedUnit:
        return LoadedUnit(index=0, encoder="eyes", rows=BYTES, bad={}, decoded=1)

    delivery = ReplicaDelivery(
        [(0, 1)],
        dist.group.WORLD,
        row_values=12,
        coded=CodedMedia(PIXELS, videos=lambda: PIXELS),
        device=torch.device("cpu"),
        news=None,
    )
    found, _ = delivery(planned_whole(media, load if rank == 0 else None))
    assert found is not None
    return found.rows, sent


def test_images_go_to_a_replica_as_bytes_and_become_values_there() -> None:
    for rows, sent in run_ranks(delivered_bytes, 2):
        assert sent == [torch.uint8]
        assert torch.equal(rows, PIXELS.decoded(BYTES))
