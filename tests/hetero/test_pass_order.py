"""The order of passes, against Megatron's own schedules on a stage that talks to nobody."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

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


class Chunk(nn.Module):
    """One number to each microbatch."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: ModelParallelConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.weight = nn.Parameter(torch.ones(1))

    def set_input_tensor(self, tensor: Any) -> None:
        pass


class Alone:
    """A communicator of one stage: whatever is asked for is there at once."""

    def __init__(self, config: ModelParallelConfig, pipeline: Pipeline) -> None:
        self.config = config
        self.total_stages, self.current_stage = pipeline.stages, pipeline.stage
        self.pp_group = SimpleNamespace(size=lambda: pipeline.stages, rank=lambda: pipeline.stage)
        self.is_pp_first_stage = pipeline.stage == 0
        self.is_pp_last_stage = pipeline.stage == pipeline.stages - 1
        self.virtual_pipeline_model_parallel_size = pipeline.chunks if pipeline.chunks > 1 else None

    def recv_forward(self, _: Any, is_first_stage: bool) -> Tensor | None:
        return _input(not is_first_stage)

    def recv_backward(self, _: Any, is_last_stage: bool) -> Tensor | None:
        return _gradient(not is_last_stage)

    def send_forward(self, *_: Any) -> None:
        pass

    send_backward = send_forward

    def send_forward_recv_backward(self, _: Tensor, shapes: Any, is_last: bool) -> Tensor | None:
        return _gradient(not is_last)

    def send_backward_recv_forward(self, _: Tensor, shapes: Any, is_first: bool) -> Tensor | None:
        return _input(not is_first)

    def send_forward_recv_forward(
        self, _: Any, *, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        found = _input(recv_prev)
        return (found, None) if overlap_p2p_comm else found

    def send_backward_recv_backward(
        self, _: Any, *, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        found = _gradient(recv_next)
        return (found, None) if overlap_p2p_comm else found

    def send_forward_backward_recv_forward_backward(
        self, *_: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        return _input(recv_prev), _gradient(recv_next)


def _input(comes: bool) -> Tensor | None:
    return torch.ones(1, requires_grad=True) if comes else None


def _gradient(comes: bool) -> Tensor | None:
    return torch.ones(1) if comes else None


def done_by_megatron(
    pipeline: Pipeline, microbatches: int, *, overlap: bool = False
) -> list[tuple[bool, int, int]]:
    """Passes as they are done: whether forward, chunk and microbatch."""
    done: list[tuple[bool, int, int]] = []
    interleaved = pipeline.chunks > 1
    config = ModelParallelConfig(
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=pipeline.chunks if interleaved else None,
        microbatch_group_size_per_vp_stage=pipeline.group if interleaved else None,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        variable_seq_lengths=True,
    )
    config.hidden_size = 1
    chunks = [Chunk(config, number) for number in range(pipeline.chunks)]
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def forward_step(data: Iterator[int], chunk: Chunk) -> tuple[Tensor, Any]:
        output = Noted.apply(chunk.weight, chunk.number, next(data), done)
        return output, lambda output: (output, {})

    schedule = forward_backward_pipelining_without_interleaving
    data: list[Iterator[int]] = [iter(range(microbatches)) for _ in chunks]
    if interleaved:
        schedule = forward_backward_pipelining_with_interleaving
    schedule(
        forward_step_func=forward_step,
        data_iterator=data if interleaved else data[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Alone(config, pipeline),
        pg_collection=groups,
    )
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
