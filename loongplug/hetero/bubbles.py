"""Work in a pipeline's bubbles: a communicator that waits for an input behind the work before it.

Megatron's schedules take the communicator that they send and receive by. This one posts a pass's
receive when it is asked for the input, and waits for it when the pass begins, behind the work that
belongs before the pass. Nobody waits for a send before the step's end: it is done when it is
received.

There is a process group for each direction: activations, gradients, and, with virtual stages, the
same from the last stage around to the first one. So in a group a rank's messages to another are in
the order of its passes, as the other one receives them. In one queue for both directions, a receive
that is posted early could lie before the send that the other rank waits for.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from loongplug.hetero.executor import Executor, Schedule, unwrapped
from loongplug.hetero.operations import before_pass
from loongplug.hetero.placement import pipeline_pairs
from loongplug.hetero.wire import Sends
from loongplug.observe.recorder import NOTHING, Recorder, Span
from loongplug.parallel.exchange_groups import create_exchange_group

# What Megatron's schedules, and what finalises gradients behind them, look for.
_GROUPS = ["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
# What goes which way; what a trace calls it, its bytes, and whom it goes to or comes from.
_WAYS = {
    "send_next": ("activations", "send forward", "sent_next", "next"),
    "recv_prev": ("activations", "receive forward", "received_previous", "previous"),
    "send_prev": ("gradients", "send backward", "sent_previous", "previous"),
    "recv_next": ("gradients", "receive backward", "received_next", "next"),
}
_INPUT_OF = {True: "recv_prev", False: "recv_next"}  # by whether a pass is a forward

# By what goes there (:func:`~.communicators.pipeline_pairs`); None on ranks of no pipeline.
PipelineGroups = Mapping[str, dist.ProcessGroup | None]


def create_pipeline_groups(
    pipelines: Sequence[Sequence[int]], *, virtual: bool, **options: Any
) -> PipelineGroups:
    """The groups of this rank's pipeline, connected.

    ``pipelines`` are all of the decoder's, each by the ranks of its stages; ``virtual``: it has
    virtual stages. ``options`` are :func:`create_exchange_group`'s. Collective over the world.
    """
    pairs = [pipeline_pairs(ranks, virtual=virtual) for ranks in pipelines]
    return {
        name: create_exchange_group(
            name,
            pipelines,
            pairs=chain(*(each[name] for each in pairs)),
            options_of="pp",
            **options,
        )
        for name in pairs[0]
    }


def filling(
    schedule: Schedule, executor: Executor, groups: PipelineGroups, *, recorder: Recorder = NOTHING
) -> Schedule:
    """``schedule`` within an ``executor``'s, and over ``groups`` in a step that streams."""

    def forward_backward(*, model: Any, **options: Any) -> Any:
        passes = executor.streamed_passes
        if passes is None:
            return schedule(model=model, **options)
        chunks = [unwrapped(each) for each in (model if isinstance(model, list) else [model])]
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        inputs = []
        for forward, place, _ in passes:
            outermost = place == (0 if forward else stages * len(chunks) - 1)
            decoder = chunks[place // stages].text_decoder
            inputs.append((forward, 0 if outermost else 1 + decoder.travelling(behind=not forward)))
        communicator = BubbleCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            get_model_config(model[0] if isinstance(model, list) else model),
            groups=groups,
            inputs=inputs,
            recorder=recorder,
        )
        own = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        options |= {"p2p_communicator": communicator, "pg_collection": own}
        with communicator.working(lambda number: executor.do(before_pass(number))):
            return schedule(model=model, **options)

    return forward_backward


class BubbleCommunicator(P2PCommunicator):
    """A stage's communicator for one step: it posts at once, and waits when a pass begins."""

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        *,
        groups: PipelineGroups,
        inputs: Sequence[tuple[bool, int]],
        recorder: Recorder = NOTHING,
    ) -> None:
        """``inputs``: of each pass, in order, whether it is a forward, and what comes for it.

        That is the number of tensors of one shape, stacked along the sequence: hidden states and
        the features that travel with them; 0 where nothing comes from another stage.
        ``pp_group`` is the pipeline's, as upstream knows it; nothing is sent by it.
        """
        super().__init__(pp_group, config)
        self._inputs = [(_INPUT_OF[forward], stacked) for forward, stacked in inputs]
        self._groups = groups
        self._recorder = recorder
        self._sends = Sends(most=inf, recorder=recorder, name="sends to other stages")
        # Of each way, what is stacked in the next inputs, and receives under way.
        self._stacked = {
            name: deque(stacked for way, stacked in self._inputs if way == name and stacked)
            for name in _INPUT_OF.values()
        }
        self._coming: dict[str, deque[tuple[dist.Work, Tensor]]] = {
            name: deque() for name in _INPUT_OF.values()
        }

    @contextmanager
    def working(self, work: Callable[[int], None]) -> Iterator[None]:
        """Around the schedule, which has ``work`` done as :func:`before_pass` says, by number."""
        number = count()

        def begun(step: Callable[..., Any]) -> Callable[..., Any]:
            def begin(*args: Any, **options: Any) -> Any:
                here = next(number)
                work(here)
                way, stacked = self._inputs[here]
                if stacked:
                    receive, tensor = self._coming[way].popleft()
                    with self._span(way, tensor):
                        receive.wait()
                return step(*args, **options)

            return begin

        with (
            patch.object(self.config, "variable_seq_lengths", False),  # both ends know the shape
            patch.object(schedules, "forward_step", begun(schedules.forward_step)),
            patch.object(schedules, "backward_step", begun(schedules.backward_step)),
        ):
            yield
        passes = next(number)
        assert passes == len(self._inputs), (passes, len(self._inputs))
        work(passes)
        self._sends.drain()

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """What all of upstream's methods send and receive by; there are no handles to wait for."""
        if tensor_send_next is not None:
            self._send("send_next", tensor_send_next)
        if tensor_send_prev is not None:
            self._send("send_prev", tensor_send_prev)
        return (
            self._receive("recv_prev", tensor_shape) if recv_prev else None,
            self._receive("recv_next", tensor_shape) if recv_next else None,
            None,
        )

    def _send(self, name: str, tensor: Tensor) -> None:
        sent = tensor.detach().contiguous()  # the schedule may take the memory from its own tensor
        with self._span(name, sent):
            work = dist.isend(sent, dst=self._peer(name), group=self._group(name))
        self._sends.add(work, sent, microbatch=0)  # of any number under way

    def _receive(self, name: str, shape: Sequence[int]) -> Tensor:
        length, *others = shape
        found = torch.empty(
            (self._stacked[name].popleft() * length, *others),
            dtype=self.config.pipeline_dtype,
            device=torch.cuda.current_device(),
            requires_grad=True,
        )
        # Not the leaf itself, of which nothing is to know before it is used.
        work = dist.irecv(found.detach(), src=self._peer(name), group=self._group(name))
        assert work is not None, "this rank is in the group"
        self._coming[name].append((work, found))
        return found

    def _peer(self, name: str) -> int:
        return int(self.next_rank if _WAYS[name][-1] == "next" else self.prev_rank)

    def _group(self, name: str) -> dist.ProcessGroup | None:
        what, *_, side = _WAYS[name]
        around = self.is_pp_last_stage if side == "next" else self.is_pp_first_stage
        return self._groups[f"{what}_around" if around else what]

    def _span(self, name: str, tensor: Tensor) -> Span:
        _, said, size, side = _WAYS[name]
        return self._recorder.span("p2p", said, **{size: tensor.nbytes, side: self._peer(name)})
