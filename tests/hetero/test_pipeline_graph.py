"""Warm-ups of modules on ranks of their own, against ranks that are simulated."""

from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import pytest
from simulated import Graph, GraphModule, distances, finish

from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pipeline_graph import ahead, warmup
from loongplug.hetero.recorded_schedule import Posted, calls
from loongplug.hetero.wire import WINDOW
from loongplug.partition import clock
from loongplug.partition.clock import StageTime
from loongplug.simulate.order import Deadlock

pytestmark = pytest.mark.quick

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
        assert Graph(modules=modules).finishes(found, microbatches=microbatches)
        short = fewer(modules, 2)
        assert Graph(modules=modules).finishes(short, microbatches=microbatches) == (
            microbatches < 2
        )


def test_the_warmup_is_the_distance_to_the_sink():
    for modules in small_graphs():
        found, decoder = distances(modules), modules[-1]
        first = ahead(pipeline=decoder.stages, virtual=False)
        for module, microbatches in product(modules[:-1], range(1, 10)):
            for stage in range(module.stages):
                count = warmup(
                    microbatches=microbatches, ahead=first, stages=module.stages, stage=stage
                )
                assert count == min(microbatches, found[module.name, stage])


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
        graph, counts = Graph(modules=modules, shapes=shapes), distances(modules)
        for microbatches in range(1, 10):
            assert graph.finishes(counts, microbatches=microbatches), (modules, microbatches)


@pytest.mark.not_quick
@pytest.mark.parametrize("shapes", [False, True])
def test_one_less_is_the_least_where_no_receive_holds_up_what_follows(shapes):
    """The first output behind the warm-up sets out before a gradient is waited for, so that a
    warm-up may be smaller by one. By two, the decoder lacks what its first backward waits for,
    where a step has as many microbatches."""
    for modules in small_graphs():
        graph, pipeline = Graph(modules=modules, shapes=shapes), modules[-1].stages
        for microbatches in range(1, 10):
            assert graph.finishes(fewer(modules, 1), microbatches=microbatches)
            hangs = not graph.finishes(fewer(modules, 2), microbatches=microbatches)
            if microbatches >= pipeline >= 2:
                assert hangs, (modules, microbatches)
            else:  # shapes within an encoder need stages that are one apart
                assert shapes or not hangs, (modules, microbatches)


def finishes_beside_early_receives(
    modules: tuple[GraphModule, ...], *, less: int, microbatches: int, window: int
) -> bool:
    """Whether a step ends where receives that are posted early hold up what follows."""
    graph, counts = Graph(modules=modules), fewer(modules, less)
    return finish(
        {
            rank: graph.posted_ahead(
                rank,
                graph.program(rank, warmup=counts[rank], microbatches=microbatches),
                ahead=window - 1,  # a queue goes on when the last of them has begun
            )
            for rank in graph.ranks
        }
    )


@pytest.mark.not_quick
def test_the_distance_is_the_least_where_a_receive_holds_up_what_follows():
    """No step hangs, and every step of more microbatches than the decoder has stages does with one
    forward fewer. With receives posted a microbatch earlier than the product's, ours hangs."""
    for modules in small_graphs():
        for microbatches in range(1, 10):
            more = microbatches > modules[-1].stages
            for less, ends in ((0, True), (1, not more)):
                assert ends == finishes_beside_early_receives(
                    modules, less=less, microbatches=microbatches, window=WINDOW
                ), (modules, microbatches, less)
    assert not finishes_beside_early_receives(FIGURE_4A, less=0, microbatches=9, window=WINDOW + 1)


def test_counts_from_the_sources_hang_where_sends_wait():
    """As upstream counts and sends: E2, with one stage fewer than E1, gets as many as E1's first.
    Its fourth output then waits for the decoder, which waits for it to take a gradient."""
    upstream = {**distances(FIGURE_4A), ("E2", 0): 4}
    waiting = Graph(modules=FIGURE_4A, edges_wait=True, shapes=True)
    for microbatches in range(1, 10):
        assert waiting.finishes(upstream, microbatches=microbatches) == (microbatches <= 3)
        assert waiting.finishes(distances(FIGURE_4A), microbatches=microbatches)


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
        waiting, free = (
            Graph(modules=modules, edges_wait=waits, shapes=True) for waits in (True, False)
        )
        for microbatches in (1, 2, 4, 8):
            hangs += not waiting.finishes(upstream, microbatches=microbatches)
            assert free.finishes(ours, microbatches=microbatches)
    assert hangs == 96  # of 192


def finishes_beside(
    pipeline: Pipeline, *, forwards: int, microbatches: int, stages: int = 1, less: int = 0
) -> bool:
    """An encoder of so many ``stages`` and a decoder under one of Megatron's schedules."""
    stage = StageTime(forward=1, backward=2)
    with patch.object(clock, "ahead", lambda **_: forwards - less):
        try:
            clock.step_time(
                [stage] * (pipeline.stages * pipeline.chunks),
                microbatches=microbatches,
                encoders=[[stage] * stages],
                pipeline=pipeline,
            )
        except Deadlock:
            return False
    return True


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
                pipeline, forwards=forwards, microbatches=microbatches, stages=stages, less=less
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
        if microbatches > 1:
            assert not finishes_beside(
                pipeline, forwards=forwards, microbatches=microbatches, less=1
            )


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_ranks_that_are_simulated_do_what_stock_does(stages, microbatches):
    graph = Graph(modules=[GraphModule(name="L", stages=stages)])
    for stage in range(stages):
        pipeline = Pipeline(stages=stages, stage=stage, chunks=1, group=stages)
        stock = [
            {(way.sends, stage + (1 if way.to_next else -1)) for way in call.ways}
            for call in calls(pipeline, microbatches)
            if isinstance(call, Posted)
        ]
        made = [
            {(move.sends, (move.target if move.sends else move.source)[1]) for move in exchange}
            for exchange in graph.program(
                ("L", stage), warmup=stages - stage - 1, microbatches=microbatches
            )
        ]
        assert made == stock
