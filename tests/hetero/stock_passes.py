"""One stage of a pipeline under Megatron's own schedules, with a communicator of the test's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from loongplug.hetero.pass_order import Pipeline


class Chunk(nn.Module):
    """One number to each microbatch."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: ModelParallelConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.weight = nn.Parameter(torch.ones(1))
        self._given: Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self._given = tensor[0] if isinstance(tensor, list) else tensor

    def state(self) -> Tensor:
        """Made of what the chunk before has made, [1]."""
        return self.weight.clone() if self._given is None else self._given * self.weight


class Alone:
    """A communicator of one stage: whatever is asked for is there at once.

    ``exchange`` is told what leaves and comes in a call, and gives what one has to wait for, by
    Megatron's names.
    """

    def __init__(self, config: ModelParallelConfig, pipeline: Pipeline) -> None:
        self.config = config
        self.total_stages, self.current_stage = pipeline.stages, pipeline.stage
        self.pp_group = SimpleNamespace(size=lambda: pipeline.stages, rank=lambda: pipeline.stage)
        self.is_pp_first_stage = pipeline.stage == 0
        self.is_pp_last_stage = pipeline.stage == pipeline.stages - 1
        self.virtual_pipeline_model_parallel_size = pipeline.chunks if pipeline.chunks > 1 else None

    def exchange(
        self,
        *,
        send_next: bool = False,
        recv_prev: bool = False,
        send_prev: bool = False,
        recv_next: bool = False,
    ) -> dict[str, Any]:
        return {}

    def recv_forward(self, _: Any, is_first_stage: bool) -> Tensor | None:
        return self._at_once(recv_prev=not is_first_stage)[0]

    def recv_backward(self, _: Any, is_last_stage: bool) -> Tensor | None:
        return self._at_once(recv_next=not is_last_stage)[1]

    def send_forward(self, _: Any, is_last_stage: bool) -> None:
        self._at_once(send_next=not is_last_stage)

    def send_backward(self, _: Any, is_first_stage: bool) -> None:
        self._at_once(send_prev=not is_first_stage)

    def send_forward_recv_backward(self, _: Tensor, shapes: Any, is_last: bool) -> Tensor | None:
        return self._at_once(send_next=not is_last, recv_next=not is_last)[1]

    def send_backward_recv_forward(self, _: Tensor, shapes: Any, is_first: bool) -> Tensor | None:
        return self._at_once(send_prev=not is_first, recv_prev=not is_first)[0]

    def send_forward_recv_forward(
        self,
        output: Tensor | None,
        *,
        recv_prev: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        ways = {"send_next": output is not None, "recv_prev": recv_prev}
        if overlap_p2p_comm:
            return _input(recv_prev), self.exchange(**ways)
        return self._at_once(**ways)[0]

    def send_backward_recv_backward(
        self,
        gradient: Tensor | None,
        *,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        ways = {"send_prev": gradient is not None, "recv_next": recv_next}
        if overlap_p2p_comm:
            return _gradient(recv_next), self.exchange(**ways)
        return self._at_once(**ways)[1]

    def send_forward_backward_recv_forward_backward(
        self,
        output: Tensor | None,
        gradient: Tensor | None,
        *,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> Any:
        sends = {"send_next": output is not None, "send_prev": gradient is not None}
        return self._at_once(recv_prev=recv_prev, recv_next=recv_next, **sends)

    def _at_once(self, **ways: bool) -> tuple[Tensor | None, Tensor | None]:
        for each in self.exchange(**ways).values():
            each.wait()
        return _input(ways.get("recv_prev", False)), _gradient(ways.get("recv_next", False))


def _input(comes: bool) -> Tensor | None:
    return torch.ones(1, requires_grad=True) if comes else None


def _gradient(comes: bool) -> Tensor | None:
    return torch.ones(1) if comes else None


def step_of_megatron(
    pipeline: Pipeline,
    microbatches: int,
    *,
    output: Callable[[Chunk, int], Tensor],
    communicator: Callable[[ModelParallelConfig, Pipeline], Alone] = Alone,
    overlap: bool = False,
) -> None:
    """A stage's step of Megatron's; ``overlap``: passes go on while what was made is sent.

    ``output`` is what a chunk makes of a microbatch, by its number.
    """
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
    schedule = forward_backward_pipelining_without_interleaving
    with_peers: dict[str, Any] = {"p2p_communicator": communicator(config, pipeline)}
    if pipeline.stages == 1:
        schedule, with_peers = forward_backward_no_pipelining, {}
    elif interleaved:
        schedule = forward_backward_pipelining_with_interleaving
    data = [iter(range(microbatches)) for _ in chunks]
    # Without torch's process groups each stage would be the first one and the last.
    with (
        patch.object(schedules, "is_pp_first_stage", lambda group: group.rank() == 0),
        patch.object(schedules, "is_pp_last_stage", lambda group: group.rank() == group.size() - 1),
    ):
        schedule(
            forward_step_func=lambda data, chunk: (output(chunk, next(data)), _loss),
            data_iterator=data if interleaved else data[0],
            model=chunks if interleaved else chunks[0],
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
            **with_peers,
        )


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return output, {}
