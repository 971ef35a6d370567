"""Warm-ups of modules on ranks of their own, against ranks that are simulated."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
from simulated import Rank, decoder_acts, finish

from loongplug.hetero.pass_order import Pipeline, ahead, warmup
from loongplug.hetero.recorded_schedule import Posted, calls
from loongplug.simulate.programs import Act, Build, End, Post, Wait
from loongplug.simulate.wires import with_shapes

pytestmark = pytest.mark.quick


@dataclass(frozen=True, kw_only=True)
class GraphModule:
    """A module's pipeline; ``into`` is what its last stage sends to, None for the decoder alone."""

    name: str
    stages: int
    into: str | None = None


Links = Mapping[Rank, Sequence[Rank]]  # those that a rank sends forward to: one, none at the sink


def links_of(modules: Sequence[GraphModule]) -> Links:
    """Every stage is one rank."""
    links: dict[Rank, list[Rank]] = {}
    for each in modules:
        links |= {(each.name, stage): [(each.name, stage + 1)] for stage in range(each.stages)}
        links[each.name, each.stages - 1] = [(each.into, 0)] if each.into else []
    return links


def distances(modules: Sequence[GraphModule]) -> dict[Rank, int]:
    """Of each module's each stage, how many stages lie behind it on the way to the decoder's last.

    With so many forwards before its first backward, no rank waits for a gradient that its own next
    output is needed for.
    """
    links = links_of(modules)

    def to_sink(rank: Rank) -> int:
        return sum(1 + to_sink(each) for each in links[rank])

    return {rank: to_sink(rank) for rank in links}


def rank_acts(
    build: Build, links: Links, rank: Rank, *, ahead: int, microbatches: int, edges_wait: bool
) -> Iterator[Act]:
    """What a rank does in Megatron's 1F1B with so many forwards ``ahead`` of its first backward.

    In each call it is through with one neighbour before it turns to the next, as upstream's
    communicator of several modules is.
    """
    before = [each for each, others in links.items() if rank in others]
    # Megatron's own stage without a forward ahead has nobody behind it. Where somebody is, it is
    # one with a forward ahead of a microbatch more, which is left out of what it does.
    more = int(not ahead and bool(links[rank]))
    stage = int(bool(before))
    row = Pipeline(stages=stage + 1 + ahead + more, stage=stage, chunks=1, group=1)
    found = [each.ends for each in calls(row, microbatches + more) if isinstance(each, Posted)]
    left_out = more * (stage + 1)
    counts = Counter[tuple[Rank, Rank]]()

    def end(other: Rank, *, sends: bool) -> End:
        way = (rank, other) if sends else (other, rank)
        message = build.message(way, counts[way], eager=not waits(way, edges_wait=edges_wait))
        counts[way] += 1
        return message, sends

    for ways in found[left_out : len(found) - left_out]:
        for other in links[rank] if ways[0].to_next else before:
            ends = tuple(end(other, sends=each.sends) for each in ways)
            yield from (Post(ends), Wait(ends))


def waits(way: tuple[Rank, Rank], *, edges_wait: bool) -> bool:
    """Whether a send waits for its receive."""
    return edges_wait or way[0][0] == way[1][0]


def finishes(
    modules: Sequence[GraphModule],
    counts: Mapping[Rank, int],
    *,
    microbatches: int,
    edges_wait: bool = False,
    shapes: bool = False,
) -> bool:
    """Whether a step ends with so many forwards of each rank ahead.

    Within a pipeline sends wait, as those of gloo and NCCL do; with ``edges_wait`` those from one
    module to another do too. With ``shapes`` a message with the shape goes ahead of each that
    waits. Upstream has both.
    """
    build, links = Build(), links_of(modules)
    acts = [
        rank_acts(
            build,
            links,
            rank,
            ahead=counts[rank],
            microbatches=microbatches,
            edges_wait=edges_wait,
        )
        for rank in links
    ]
    programs = build.programs([[*each] for each in acts])
    if shapes:
        programs = with_shapes(programs, of=partial(waits, edges_wait=edges_wait))
    return finish(programs)


FIGURE_4A = (
    GraphModule(name="E1", stages=2, into="L"),
    GraphModule(name="E2", stages=1, into="L"),
    GraphModule(name="L", stages=3),
)


def small_graphs() -> Iterator[tuple[GraphModule, ...]]:
    """One or two encoders of one to three stages, a decoder of one to four."""
    sides = [(), (1,), (2,), (3,)]
    for first, second, pipeline in product((1, 2, 3), sides, (1, 2, 3, 4)):
        encoders = [
            GraphModule(name=f"E{number}", stages=stages, into="L")
            for number, stages in enumerate((first, *second))
        ]
        yield (*encoders, GraphModule(name="L", stages=pipeline))


def fewer(modules: tuple[GraphModule, ...], less: int) -> dict[tuple[str, int], int]:
    """The distances; encoders' are smaller by ``less``."""
    return {
        (name, stage): count if name == "L" else max(0, count - less)
        for (name, stage), count in distances(modules).items()
    }


def test_distances_of_figure_4a():
    assert distances(FIGURE_4A) == {
        ("E1", 0): 4,
        ("E1", 1): 3,
        ("E2", 0): 3,
        ("L", 0): 2,
        ("L", 1): 1,
        ("L", 2): 0,
    }


def test_a_module_may_lead_into_one_that_leads_into_the_decoder():
    modules = (
        GraphModule(name="L", stages=2),
        GraphModule(name="resampler", stages=1, into="L"),
        GraphModule(name="E", stages=2, into="resampler"),
    )
    found = distances(modules)
    assert [found["E", 0], found["E", 1], found["resampler", 0], found["L", 0]] == [4, 3, 2, 1]
    for microbatches in range(1, 10):
        assert finishes(modules, found, microbatches=microbatches)
        short = fewer(modules, 2)
        assert finishes(modules, short, microbatches=microbatches) == (microbatches < 2)


def test_the_warmup_is_the_distance_to_the_sink():
    for modules in small_graphs():
        found, decoder = distances(modules), modules[-1]
        first = ahead(pipeline=decoder.stages, virtual=False)
        for module in modules[:-1]:
            for stage in range(module.stages):
                count = warmup(ahead=first, stages=module.stages, stage=stage)
                assert count == found[module.name, stage]


@pytest.mark.parametrize(
    ("pipeline", "virtual", "group", "forwards"),
    [
        (1, False, None, 1),
        (4, False, None, 4),
        (4, True, None, 8),
        (1, True, None, 1),
        (2, True, 4, 8),
    ],
)
def test_forwards_before_the_first_backward(pipeline, virtual, group, forwards):
    assert ahead(pipeline=pipeline, virtual=virtual, group=group) == forwards


@pytest.mark.not_quick
@pytest.mark.parametrize("shapes", [False, True])
def test_no_small_graph_hangs(shapes):
    for modules in small_graphs():
        for microbatches in range(1, 10):
            assert finishes(
                modules, distances(modules), microbatches=microbatches, shapes=shapes
            ), (modules, microbatches)


@pytest.mark.not_quick
@pytest.mark.parametrize("shapes", [False, True])
def test_one_less_is_the_least_where_no_receive_holds_up_what_follows(shapes):
    """The first output behind the warm-up sets out before a gradient is waited for, so that a
    warm-up may be smaller by one. By two, the decoder lacks what its first backward waits for,
    where a step has as many microbatches."""
    for modules in small_graphs():
        pipeline = modules[-1].stages
        for microbatches in range(1, 10):
            one, two = (
                finishes(modules, fewer(modules, less), microbatches=microbatches, shapes=shapes)
                for less in (1, 2)
            )
            assert one, (modules, microbatches)
            if microbatches >= pipeline >= 2:
                assert not two, (modules, microbatches)
            else:  # shapes within an encoder need stages that are one apart
                assert shapes or two, (modules, microbatches)


def test_counts_from_the_sources_hang_where_sends_wait():
    """As upstream counts and sends: E2, with one stage fewer than E1, gets as many as E1's first.
    Its fourth output then waits for the decoder, which waits for it to take a gradient."""
    upstream = {**distances(FIGURE_4A), ("E2", 0): 4}
    for microbatches in range(1, 10):
        theirs, ours = (
            finishes(FIGURE_4A, counts, microbatches=microbatches, edges_wait=True, shapes=True)
            for counts in (upstream, distances(FIGURE_4A))
        )
        assert theirs == (microbatches <= 3)
        assert ours


def test_upstream_hangs_where_encoders_are_not_equally_deep():
    """Two encoders and a decoder of one to four stages each: half of the steps, and none of ours.

    Upstream counts from the deepest source, and its sends between modules wait, behind shapes.
    """
    hangs = 0
    for first, second, pipeline in product(range(1, 5), repeat=3):
        if first == second:
            continue
        modules = (
            GraphModule(name="E0", stages=first, into="L"),
            GraphModule(name="E1", stages=second, into="L"),
            GraphModule(name="L", stages=pipeline),
        )
        ours, decoder = distances(modules), max(first, second) + pipeline - 1
        upstream = {
            (name, stage): count if name == "L" else decoder - stage
            for (name, stage), count in ours.items()
        }
        for microbatches in (1, 2, 4, 8):
            hangs += not finishes(
                modules, upstream, microbatches=microbatches, edges_wait=True, shapes=True
            )
            assert finishes(modules, ours, microbatches=microbatches, shapes=True)
    assert hangs == 96  # of 192


def finishes_beside(
    pipeline: Pipeline, *, forwards: int, microbatches: int, stages: int = 1
) -> bool:
    """An encoder of so many ``stages`` and a decoder under one of Megatron's schedules.

    The encoder's last stage has so many ``forwards`` ahead, and each other one more than the next.
    """
    build, links = Build(), links_of((GraphModule(name="E", stages=stages, into="L"),))
    acts = decoder_acts(build, pipeline, microbatches, sources=[("E", stages - 1)], eager=True)
    for rank in links:
        count = forwards + stages - 1 - rank[1]
        acts.append(
            rank_acts(build, links, rank, ahead=count, microbatches=microbatches, edges_wait=False)
        )
    return finish(build.programs([[*each] for each in acts]))


def interleaved() -> Iterator[tuple[Pipeline, int]]:
    """Small decoders with virtual stages, with and without the overlap of MoE communication."""
    for stages, chunks, overlaps in product((2, 3, 4), (2, 3), (False, True)):
        for microbatches in range(stages, 4 * stages + 1, stages):
            pipeline = Pipeline(
                stages=stages, stage=0, chunks=chunks, group=stages, overlaps=overlaps
            )
            yield pipeline, microbatches


@pytest.mark.not_quick
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_virtual_stages_take_twice_as_many(stages):
    for pipeline, microbatches in interleaved():
        forwards = ahead(pipeline=pipeline.stages, virtual=True)
        for less in (0, 1, 2):
            finished = finishes_beside(
                pipeline, forwards=forwards - less, microbatches=microbatches, stages=stages
            )
            assert finished == (less < 2 or microbatches < forwards), (pipeline, microbatches)


def test_larger_groups_of_virtual_stages_take_more():
    """With groups as large as the flag says, as many forwards as without it are too few."""
    hangs = 0
    for stages, chunks, more in product((2, 3), (2, 3), (1, 3)):
        group = stages + more
        pipeline = Pipeline(stages=stages, stage=0, chunks=chunks, group=group)
        for microbatches in (group, 2 * group, 3 * group):
            forwards = ahead(pipeline=stages, virtual=True, group=group)
            assert finishes_beside(pipeline, forwards=forwards, microbatches=microbatches)
            plain = ahead(pipeline=stages, virtual=True)
            hangs += not finishes_beside(pipeline, forwards=plain, microbatches=microbatches)
    assert hangs


def test_the_overlap_of_moe_communication_without_a_pipeline():
    """A forward runs together with the backward before it: the one that is not least is needed."""
    pipeline = Pipeline(stages=1, stage=0, chunks=1, group=1, overlaps=True)
    forwards = ahead(pipeline=1, virtual=False)
    for microbatches in range(1, 6):
        assert finishes_beside(pipeline, forwards=forwards, microbatches=microbatches)
        one_less = finishes_beside(pipeline, forwards=forwards - 1, microbatches=microbatches)
        assert one_less == (microbatches == 1)
