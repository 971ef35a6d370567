"""The order of passes, against Megatron's own schedules on a stage that talks to nobody."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from stock_passes import Chunk, step_of_megatron
from torch import Tensor

from loongplug.hetero.pass_order import Pipeline
from loongplug.hetero.pipeline_clock import DecoderPass, decoder_passes

pytestmark = pytest.mark.quick


class Noted(torch.autograd.Function):
    """Says when its forward and its backward are done."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, chunk: int, number: int, done: list[Any]) -> Tensor:
        ctx.noted = chunk, number, done
        done.append((True, chunk, number))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        chunk, number, done = ctx.noted
        done.append((False, chunk, number))
        return gradient, None, None, None


def done_by_megatron(
    pipeline: Pipeline, microbatches: int, *, overlap: bool = False
) -> list[tuple[bool, int, int]]:
    """Passes as they are done: whether forward, chunk and microbatch."""
    done: list[tuple[bool, int, int]] = []

    def output(chunk: Chunk, number: int) -> Tensor:
        made: Tensor = Noted.apply(chunk.state(), chunk.number, number, done)
        return made

    step_of_megatron(pipeline, microbatches, output=output, overlap=overlap)
    return done


def as_planned(pipeline: Pipeline, microbatches: int) -> list[tuple[bool, int, int]]:
    found = []
    for forward, place, microbatch in decoder_passes(pipeline, microbatches):
        chunk, stage = divmod(place, pipeline.stages)
        assert stage == pipeline.stage
        found.append((forward, chunk, microbatch))
    return found


@pytest.mark.parametrize("microbatches", [1, 2, 5, 9])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        pipeline = Pipeline(stages=stages, stage=stage, chunks=1, group=stages)
        found = done_by_megatron(pipeline, microbatches)
        assert found == as_planned(pipeline, microbatches)
        assert len(found) == 2 * microbatches


def interleaved() -> Iterator[tuple[Pipeline, int]]:
    """All stages of small pipelines, whose groups are whole or have a smaller one behind them."""
    for stages, chunks, more in product((2, 3), (2, 3), (0, 1, 3)):
        group = stages + more
        for microbatches, stage in product(
            (group, 2 * group, 2 * group + stages, 3 * group), range(stages)
        ):
            yield (
                Pipeline(stages=stages, stage=stage, chunks=chunks, group=group),
                microbatches,
            )


@pytest.mark.parametrize("overlap", [False, True])
def test_interleaved_with_groups_of_any_size(overlap: bool) -> None:
    for pipeline, microbatches in interleaved():
        found = done_by_megatron(pipeline, microbatches, overlap=overlap)
        assert found == as_planned(pipeline, microbatches), (pipeline, microbatches)


def test_a_pass_knows_its_place_on_the_microbatch_s_way() -> None:
    second = Pipeline(stages=2, stage=1, chunks=2, group=2)
    first = decoder_passes(second, 2)[:4]
    assert first == (
        DecoderPass(forward=True, place=1, microbatch=0),
        DecoderPass(forward=True, place=1, microbatch=1),
        DecoderPass(forward=True, place=3, microbatch=0),
        DecoderPass(forward=False, place=3, microbatch=0),
    )
