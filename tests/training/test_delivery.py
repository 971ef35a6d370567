"""The rows of two encoders' units, on the ranks that encode them, and word of bad samples."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.data.bad_samples import BadSample
from loongplug.data.conversation import Medium
from loongplug.data.source import PlannedMicrobatch, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch
from loongplug.training.delivery import ReplicaDelivery, deliver, loaded_replicas

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

        nothing: tuple[Medium, ...] = tuple(object() for _ in media)  # type: ignore[misc]
        return PlannedUnit(
            media=MediaBatch(
                index=index,
                encoder=encoder,
                media=nothing,
                grids=tuple((1, 1, rows) for rows, _ in media),
                samples=tuple(sample for _, sample in media),
                where=("rows.jsonl:1",) * len(media),
            ),
            encoder_replica=replica,
            load=load if replica in loaded_replicas(replicas, rank=rank) else None,
        )

    return PlannedMicrobatch(
        number=index, samples=(), units={name: unit(name) for name in REPLICAS}, begins=None
    )


def delivered(rank: int, *, news: bool) -> list[tuple[dict[str, torch.Tensor], set[int]]]:
    everyone, pair = dist.group.WORLD, dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(3)][rank]
    groups = {"eyes": alone, "ears": pair if rank < 2 else None}
    deliveries = {
        name: ReplicaDelivery(
            replicas,
            groups[name],
            row_values=VALUES[name],
            device=torch.device("cpu"),
            news=everyone if news else None,
            channel=number,
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
        for index, (rows, bad) in enumerate(microbatches):
            encodes = {
                name: rank in replicas[index % len(replicas)] for name, replicas in REPLICAS.items()
            }
            assert rows.keys() == {name for name, here in encodes.items() if here}
            for name, found in rows.items():
                assert torch.equal(found, rows_of(index, name))
            knows = {
                name
                for name, replicas in REPLICAS.items()
                if news or replicas[index % len(replicas)][0] == rank
            }
            assert bad == set().union(*(UNITS[index, name][1] for name in knows))
