"""The rows of two encoders' units, on the ranks that encode them, and word of bad samples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_units import planned_whole
from ranks import run_ranks

from loongplug.data.media_loader import CodedMedia, PixelBytes
from loongplug.data.planned_media import (
    LoadedUnit,
    MediaBatch,
    PlannedMicrobatch,
    PlannedUnit,
    UnitMedium,
)
from loongplug.data.sample import BadSample, MediumExtent
from loongplug.training.delivery import News, ReplicaDelivery, store_of_news

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
                rows=rows_of(index, encoder),
                bad={number: BadSample(kind="pixels", message="of noise") for number in bad},
                decoded=len(media),
            )

        heard = (
            UnitMedium(sample, 0, number, MediumExtent("audio", (1, 1, rows)))
            for number, (rows, sample) in enumerate(media)
        )
        return planned_whole(
            MediaBatch(index=index, encoder=encoder, media=tuple(heard)),
            load if replicas[replica][0] == rank else None,
            replica=replica,
        )

    return PlannedMicrobatch(
        number=index, extents=(), units={name: unit(name) for name in REPLICAS}, text=tuple
    )


def delivered(rank: int) -> list[tuple[dict[str, torch.Tensor], set[int]]]:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(3)][rank]
    groups = {"eyes": alone, "ears": pair if rank < 2 else None}
    deliveries = {
        name: ReplicaDelivery(
            replicas,
            groups[name],
            rank=rank,
            row_values=VALUES[name],
            coded=None,
            device=torch.device("cpu"),
            news=News(store=store_of_news(), encoder=name, recent=9, seconds=20.0),
        )
        for name, replicas in REPLICAS.items()
    }
    order: list[tuple[int, str]] = []
    found = []
    for index in range(4):
        units = planned(rank, index, order).units
        made = {name: each(units[name]) for name, each in deliveries.items()}
        assert all(each < (index, "") for each in order)  # media are loaded when they are taken
        media = {name: each.taken().rows for name, (each, _) in made.items() if each is not None}
        bad = set[int]().union(*(each() for _, heard in made.values() for each in heard))
        found.append((media, bad))
    return found


def test_each_rank_has_the_rows_that_it_encodes_and_all_know_of_bad_samples() -> None:
    for rank, microbatches in enumerate(run_ranks(delivered, 3)):
        for index, (media, bad) in enumerate(microbatches):
            encodes = {
                name: rank in replicas[index % len(replicas)] for name, replicas in REPLICAS.items()
            }
            assert media.keys() == {name for name, here in encodes.items() if here}
            for name, found in media.items():
                assert torch.equal(found, rows_of(index, name))
            assert bad == set().union(*(UNITS[index, name][1] for name in REPLICAS))


def told(rank: int) -> list[set[int]]:
    """Rank 0 tells of five microbatches, of which the last three's word stays."""
    news = News(store=store_of_news(), encoder="eyes", recent=3, seconds=20.0)
    for index in range(5) if rank == 0 else ():
        news.tell(0, index, {index})
    dist.barrier()
    with pytest.raises(RuntimeError, match="timed out waiting for what rank 0"):
        replace(news, seconds=0.05).heard(0, 1, 0)
    return [news.heard(0, index, 0) for index in (2, 3, 4)]


def test_word_stays_until_all_have_heard_it() -> None:
    assert run_ranks(told, 2) == [[{2}, {3}, {4}]] * 2


PIXELS = PixelBytes(values=torch.arange(768.0).view(3, 256), frames=2)
BYTES = torch.arange(18, dtype=torch.uint8).view(3, 6)


def delivered_bytes(rank: int) -> tuple[torch.Tensor, list[tuple[torch.dtype, int]]]:
    """Images' rows on both ranks of a replica, in two pieces, and what was sent for them."""
    sent: list[tuple[torch.dtype, int]] = []
    broadcast = dist.broadcast

    def watched(rows: torch.Tensor, **options: Any) -> Any:
        sent.append((rows.dtype, len(rows)))
        return broadcast(rows, **options)

    dist.broadcast = watched
    seen = MediumExtent("image", (1, 1, 1))
    media = MediaBatch(
        index=0,
        encoder="eyes",
        media=tuple(UnitMedium(n // 2, 0, n, seen) for n in range(3)),
    )

    def load() -> LoadedUnit:
        return LoadedUnit(rows=BYTES, bad={}, decoded=1)

    delivery = ReplicaDelivery(
        [(0, 1)],
        dist.group.WORLD,
        rank=rank,
        row_values=12,
        coded=CodedMedia(PIXELS, videos=lambda: PIXELS),
        device=torch.device("cpu"),
        news=None,
    )
    found, _ = delivery(planned_whole(media, load if rank == 0 else None))
    assert found is not None
    assert not sent
    taken = [found.part(each).taken() for each in (range(2), range(2, 3))]
    pieces = [each.rows for each in taken]
    assert {each.loaded.dtype for each in taken} == {torch.uint8}
    return torch.cat(pieces), sent


def test_images_go_to_a_replica_as_bytes_of_pieces_and_become_values_there() -> None:
    for rows, sent in run_ranks(delivered_bytes, 2):
        assert sent == [(torch.uint8, 2), (torch.uint8, 1)]
        assert torch.equal(rows, PIXELS.decoded(BYTES))
