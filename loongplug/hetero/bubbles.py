"""Work in a pipeline's bubbles: a communicator that has it done before it waits.

Megatron's schedules take the communicator that they send and receive by. This one posts the
receive of a pass's input, has the work done that belongs before the pass, and waits only then.
Nobody waits for a send before the step's end: with gloo and with NCCL a send is done when it is
received, and the next stage may be at work of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from loongplug.hetero.executor import Executor, Schedule
from loongplug.hetero.pipeline_wires import Channel, PipelineGroups, Sent, StageInput
from loongplug.hetero.sends import Sends
from loongplug.observe.recorder import NOTHING, Recorder

# What Megatron's schedules, and what finalises gradients behind them, look for.
_GROUPS = ["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
_RECEIVES = ("recv_prev", "recv_next")
# What a trace calls a message, its bytes, and whom it goes to or comes from.
_SEND_NEXT = ("send forward", "sent_next", "next")
_RECV_PREV = ("receive forward", "received_previous", "previous")
_SEND_PREV = ("send backward", "sent_previous", "previous")
_RECV_NEXT = ("receive backward", "received_next", "next")


def filling(
    schedule: Schedule, executor: Executor, groups: PipelineGroups, *, recorder: Recorder = NOTHING
) -> Schedule:
    """``schedule`` as it is; in a step that streams, by a communicator that has work done.

    It is put within the ``executor`` of the encoder that may stream. ``groups`` is what stages send
    over then.
    """

    def forward_backward(*, model: Any, **options: Any) -> Any:
        passes = executor.streamed_passes
        if passes is None:
            return schedule(model=model, **options)
        communicator = BubbleCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            get_model_config(model[0] if isinstance(model, list) else model),
            groups=groups,
            forwards=[each.forward for each in passes],
            work=executor.before_pass,
            recorder=recorder,
        )
        own = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        options |= {"p2p_communicator": communicator, "pg_collection": own}
        result = schedule(model=model, **options)
        communicator.finish()
        return result

    return forward_backward


class BubbleCommunicator(P2PCommunicator):
    """One stage's, for one step: between two passes it posts, has the work done, and waits.

    Where a schedule sends what a forward and a backward have made in one call (virtual stages
    without ``overlap_p2p_comm``), both come behind that call, and so does the work before both.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        *,
        groups: PipelineGroups,
        forwards: Sequence[bool],
        work: Callable[[int], None],
        recorder: Recorder = NOTHING,
    ) -> None:
        """``forwards``: of each pass of the stage, in its order, whether it is a forward.

        ``work`` is called before each of them with its number, from 0 on, and once behind the last.
        What the pass before has made has set out then, and the input of this one may come.
        ``pp_group`` is the pipeline's, as upstream knows it; nothing is sent by it.
        """
        super().__init__(pp_group, config)
        assert not config.use_ring_exchange_p2p, "not of stock PyTorch"
        assert not config.overlap_p2p_comm_warmup_flush, "receives are posted behind a pass"
        assert not config.overlap_moe_expert_parallel_comm, "passes are done in turn"
        self._forwards = tuple(forwards)
        self._work = work
        self._recorder = recorder
        self._pass = -1  # the last one before which the work was done
        self._due = 0  # how many passes come behind what is communicated now
        # By pass, of which as many as there are may be under way: nobody waits for a send.
        self._sends = Sends(
            most=len(self._forwards) + 1, recorder=recorder, name="sends to other stages"
        )
        self._last: dict[str, StageInput] = {}  # receive of each way
        first, last = self.is_pp_first_stage, self.is_pp_last_stage
        there, back = ("activations", "activations_around"), ("gradients", "gradients_around")
        self._ways = {
            name: Channel(name=said, size=size, side=side, peer=peer, group=group)
            for name, (said, size, side), peer, (inner, around), is_around in (
                ("send_next", _SEND_NEXT, self.next_rank, there, last),
                ("recv_prev", _RECV_PREV, self.prev_rank, there, first),
                ("send_prev", _SEND_PREV, self.prev_rank, back, first),
                ("recv_next", _RECV_NEXT, self.next_rank, back, last),
            )
            if (group := groups.get(around if is_around else inner)) is not None
        }

    def finish(self) -> None:
        """Behind the schedule: do the work behind the last pass, and wait for what is sent."""
        assert self._pass == len(self._forwards) - 1, (self._pass, len(self._forwards))
        self._work(len(self._forwards))
        self._sends.drain()

    def recv_forward(self, *args: Any, **options: Any) -> Any:
        """Before a forward."""
        with self._before_next():
            return super().recv_forward(*args, **options)

    def recv_backward(self, *args: Any, **options: Any) -> Any:
        """Before a backward."""
        with self._before_next():
            return super().recv_backward(*args, **options)

    def send_forward_recv_backward(self, *args: Any, **options: Any) -> Any:
        """Between a forward and a backward."""
        with self._before_next():
            return super().send_forward_recv_backward(*args, **options)

    def send_backward_recv_forward(self, *args: Any, **options: Any) -> Any:
        """Between a backward and a forward."""
        with self._before_next():
            return super().send_backward_recv_forward(*args, **options)

    def send_forward_recv_forward(
        self, *args: Any, overlap_p2p_comm: bool = False, **options: Any
    ) -> Any:
        """Behind a forward. Where a backward is next, its receive was posted before or comes yet.

        It comes yet where all forwards are before the first backward.
        """
        comes_yet = not overlap_p2p_comm and not self._is_forward(self._pass + 1)
        with self._before_next(0 if comes_yet else 1):
            return super().send_forward_recv_forward(
                *args, overlap_p2p_comm=overlap_p2p_comm, **options
            )

    def send_backward_recv_backward(self, *args: Any, **options: Any) -> Any:
        """Behind a backward, or ahead of the first one, whose receive is posted early."""
        early = self._is_forward(self._pass)
        with self._before_next(0 if early else 1):
            return super().send_backward_recv_backward(*args, **options)

    def send_forward_backward_recv_forward_backward(self, *args: Any, **options: Any) -> Any:
        """Behind a forward, or that and a backward. Such two come, or a backward alone."""
        with self._before_next(2 if self._is_forward(self._pass + 1) else 1):
            return super().send_forward_backward_recv_forward_backward(*args, **options)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        """What all of upstream's methods send and receive by; its handles where they wait later."""
        sends = {
            name: self._send(name, tensor)
            for name, tensor in (("send_next", tensor_send_next), ("send_prev", tensor_send_prev))
            if tensor is not None
        }
        receives = {
            name: self._receive(name, tensor_shape)
            for name, wanted in (("recv_prev", recv_prev), ("recv_next", recv_next))
            if wanted
        }
        self._do_due()
        if wait_on_reqs:
            for each in receives.values():
                each.wait()
        found = [receives[name].tensor if name in receives else None for name in _RECEIVES]
        return (*found, None if wait_on_reqs else {**receives, **sends})

    @contextmanager
    def _before_next(self, passes: int = 1) -> Iterator[None]:
        """So many passes come behind what is communicated within, if the step has as many."""
        self._due = passes
        yield
        self._do_due()  # where there was nothing to communicate

    def _do_due(self) -> None:
        while self._due:
            self._due -= 1
            if self._pass + 1 < len(self._forwards):
                self._pass += 1
                self._work(self._pass)

    def _is_forward(self, number: int) -> bool:
        return number < len(self._forwards) and self._forwards[number]

    @property
    def _announces(self) -> bool:
        """Whether the stages tell each other the shape of what they send."""
        return bool(self.config.variable_seq_lengths or self.config.mtp_standalone)

    def _receive(self, name: str, shape: Any) -> StageInput:
        found = StageInput(
            self._ways[name],
            None if self._announces else shape,
            dtype=self.config.pipeline_dtype,
            before=self._last.get(name),
            recorder=self._recorder,
        )
        if self._announces:
            self._last[name] = found
        return found

    def _send(self, name: str, tensor: Tensor) -> Sent:
        way = self._ways[name]
        # The schedule may take the memory from its own tensor.
        sent = tensor.detach().contiguous()
        if self._announces:
            shape = torch.tensor(sent.shape, dtype=torch.int64, device=sent.device)
            self._sends.add(way.send(shape), shape, microbatch=self._pass)
        with way.span(self._recorder, tensor=sent):
            self._sends.add(way.send(sent), sent, microbatch=self._pass)
        return Sent()
