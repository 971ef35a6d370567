"""Warm-ups of modules on ranks of their own: how far the sink is; upstream's count hangs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

import pytest
from queued import finish

from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.recorded_schedule import Posted, calls, forwards_first
from loongplug.simulate.programs import Act, Build, End, Post, Wait
from loongplug.simulate.wires import with_shapes

pytestmark = pytest.mark.quick

Rank = tuple[str, int]  # a module and one of its stages
Modules = Mapping[str, int]  # the stages of each; the last ones of encoders send to the decoder, L


def links_of(modules: Modules) -> dict[Rank, Rank]:
    """Who sends forward to whom; the decoder's last stage, the sink, to nobody."""
    links: dict[Rank, Rank] = {}
    for name, stages in modules.items():
        links |= {(name, stage): (name, stage + 1) for stage in range(stages - 1)}
        links |= {(name, stages - 1): ("L", 0)} if name != "L" else {}
    return links


def distances(modules: Modules) -> dict[Rank, int]:
    """Of each module's each stage, how many stages lie behind it on the way to the sink.

    With so many forwards before its first backward, no rank waits for a gradient that its own next
    output is needed for.
    """
    links = links_of(modules)

    def to_sink(rank: Rank) -> int:
        return 1 + to_sink(links[rank]) if rank in links else 0

    return {
        (name, n): to_sink((name, n)) for name, stages in modules.items() for n in range(stages)
    }


def rank_acts(
    build: Build, links: Mapping[Rank, Rank], rank: Rank, *, ahead: int, microbatches: int
) -> Iterator[Act]:
    """What a rank does in Megatron's 1F1B with so many forwards ``ahead`` of its first backward.

    In each call it is through with one neighbour before it turns to the next, as upstream's
    communicator of several modules is.
    """
    before = [each for each, other in links.items() if other == rank]
    # Megatron's own stage without a forward ahead has nobody behind it. Where somebody is, it is
    # one with a forward ahead of a microbatch more, which is left out of what it does.
    more = int(not ahead and rank in links)
    stage = int(bool(before))
    row = Pipeline(stages=stage + 1 + ahead + more, stage=stage, chunks=1, group=1)
    found = [each.ends for each in calls(row, microbatches + more) if isinstance(each, Posted)]
    left_out = more * (stage + 1)
    counts = Counter[tuple[Rank, Rank]]()

    def end(other: Rank, *, sends: bool) -> End:
        way = (rank, other) if sends else (other, rank)
        counts[way] += 1
        return build.message(way, counts[way], eager=False), sends

    for ways in found[left_out : len(found) - left_out]:
        for other in [links[rank]] if ways[0].to_next else before:
            ends = tuple(end(other, sends=each.sends) for each in ways)
            yield from (Post(ends), Wait(ends))


def finishes(modules: Modules, counts: Mapping[Rank, int], *, microbatches: int) -> bool:
    """Whether a step ends with so many forwards of each rank ahead, where every send waits.

    A message with the shape goes ahead of each. Upstream has both.
    """
    build, links = Build(), links_of(modules)
    acts = [
        [*rank_acts(build, links, rank, ahead=count, microbatches=microbatches)]
        for rank, count in counts.items()
    ]
    return finish(with_shapes(build.programs(acts), of=lambda _: True))


def test_the_warmup_is_the_distance_to_the_sink():
    for encoder, decoder in product((1, 2, 3), (1, 2, 3, 4)):
        found = distances({"E": encoder, "L": decoder})
        first = Pipeline(stages=decoder, stage=0, chunks=1, group=decoder)
        for stage in range(encoder):
            ahead = [
                count - number
                for number, count in enumerate(
                    forwards_first(first, 20, behind=encoder - 1 - stage), start=1
                )
                if count < 20
            ]
            assert ahead
            assert {*ahead} == {found["E", stage]}


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "overlaps", "forwards"),
    [
        (1, 1, 1, False, [2, 3, 4, 5, 6, 6]),
        (1, 1, 1, True, [3, 4, 5, 6, 6, 6]),
        (2, 2, 2, False, [5, 6, 7, 8, 8, 8, 8, 8]),
        # Until its sixth backward, the decoder takes nothing of the third group: neither may the
        # encoder go on before it has that one's gradient.
        (2, 3, 6, False, [13, 13, 13, 13, 13, 18, *[18] * 12]),
        (2, 2, 6, False, [10, 11, 12, 13, 13, 15, 16, 17, 18, *[18] * 9]),
    ],
)
def test_forwards_before_each_backward(stages, chunks, group, overlaps, forwards):
    first = Pipeline(stages=stages, stage=0, chunks=chunks, group=group, overlaps=overlaps)
    assert [*forwards_first(first, len(forwards), behind=0)] == forwards


def test_upstream_hangs_where_encoders_are_not_equally_deep():
    """Two encoders and a decoder of one to four stages each: half of the steps, and none of ours.

    Upstream counts from the deepest source.
    """
    hangs = 0
    for first, second, decoder in product(range(1, 5), repeat=3):
        if first == second:
            continue
        modules = {"E0": first, "E1": second, "L": decoder}
        ours, deepest = distances(modules), max(first, second) + decoder - 1
        upstream = {
            (name, stage): count if name == "L" else deepest - stage
            for (name, stage), count in ours.items()
        }
        for microbatches in (1, 2, 4, 8):
            hangs += not finishes(modules, upstream, microbatches=microbatches)
            assert finishes(modules, ours, microbatches=microbatches)
    assert hangs == 96  # of 192
