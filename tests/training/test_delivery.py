"""The rows of two encoders' units, on the ranks that encode them, and word of bad samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_units import planned_whole
from ranks import run_ranks

from loongplug.data.bad_samples import BadSample
from loongplug.data.conversation import AudioClip, Medium
from loongplug.data.media import CodedMedia
from loongplug.data.microbatch import MediaInput
from loongplug.data.pixel_bytes import PixelBytes
from loongplug.data.source import PlannedMicrobatch, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.training.delivery import News, ReplicaDelivery, deliver, loaded_replicas

pytestmark = pytest.mark.quick

# Eyes are encoded by each rank in turn, ears by the first two together.
REPLICAS = {"eyes": ((0,), (1,), (2,)), "ears": ((0, 1),)}
VALUES = {"eyes": 3, "ears": 5}
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
