"""The order of passes, against Megatron's own schedules as they are recorded."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from loongplug.hetero.pass_order import Pipeline, Turn, turns
from loongplug.hetero.recorded_schedule import calls
from loongplug.hetero.step_costs import DecoderPass, decoder_passes

pytestmark = pytest.mark.quick


def plain() -> Iterator[tuple[Pipeline, int]]:
    """All stages of small pipelines."""
    for stages, microbatches in product((1, 2, 3, 4), (1, 2, 5, 9)):
        for stage in range(stages):
            yield Pipeline(stages=stages, stage=stage, chunks=1, group=stages), microbatches


def interleaved() -> Iterator[tuple[Pipeline, int]]:
    """The same, whose groups are whole or have a smaller one behind them."""
    for stages, chunks, more in product((2, 3), (2, 3), (0, 1, 3)):
        group = stages + more
        for microbatches, stage in product(
            (group, 2 * group, 2 * group + stages, 3 * group), range(stages)
        ):
            yield Pipeline(stages=stages, stage=stage, chunks=chunks, group=group), microbatches


def check(pipeline: Pipeline, microbatches: int, *, beside_sends: bool = False) -> None:
    found = calls(pipeline, microbatches, beside_sends=beside_sends)
    passes = [each for each in found if isinstance(each, Turn)]
    assert passes == [*turns(pipeline, microbatches)], (pipeline, microbatches)


def test_1f1b() -> None:
    for pipeline, microbatches in plain():
        check(pipeline, microbatches)


@pytest.mark.parametrize("beside_sends", [False, True])
def test_interleaved_with_groups_of_any_size(beside_sends: bool) -> None:
    for pipeline, microbatches in interleaved():
        check(pipeline, microbatches, beside_sends=beside_sends)


def test_combined_passes() -> None:
    """Megatron has them with virtual stages, and without a pipeline."""
    alone = ((Pipeline(stages=1, stage=0, chunks=1, group=1), number) for number in (1, 2, 5))
    for pipeline, microbatches in (*alone, *interleaved()):
        check(replace(pipeline, overlaps=True), microbatches, beside_sends=pipeline.stages > 1)


def test_a_pass_knows_its_place_on_the_microbatch_s_way() -> None:
    second = Pipeline(stages=2, stage=1, chunks=2, group=2)
    first = decoder_passes(second, 2)[:4]
    assert first == (
        DecoderPass(forward=True, place=1, microbatch=0),
        DecoderPass(forward=True, place=1, microbatch=1),
        DecoderPass(forward=True, place=3, microbatch=0),
        DecoderPass(forward=False, place=3, microbatch=0),
    )
