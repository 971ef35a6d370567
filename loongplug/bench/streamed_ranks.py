"""A rank of ``streamed``: encoder work between sleeping stages' passes, pieces over edges.

The plan, the communicator and the edges are the product's. This is in the place of an executor,
which would want a model.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from loongplug.bench.pace import Pace
from loongplug.bench.paced_model import HIDDEN, TOKENS
from loongplug.bench.pipeline_work import Case, streamed_step
from loongplug.data.microbatch import Share
from loongplug.hetero.bubbles import BubbleCommunicator
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.piece_edges import PieceEdges, create_piece_groups
from loongplug.hetero.pipeline_clock import EncoderWork
from loongplug.hetero.pipeline_wires import create_pipeline_groups
from loongplug.hetero.placement import Edge
from loongplug.hetero.streaming import streamed
from loongplug.models.features import Features
from loongplug.observe.recorder import Recorder

_WINDOW = 4  # receives of pieces under way
_GROUPS = ["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
_CPU = torch.device("cpu")


class StreamedSide:
    """One rank's encoder side in all steps of a case; the decoder's feature source.

    Megatron's groups are there. Collective over all ranks.
    """

    def __init__(self, case: Case, *, pace: Pace, recorder: Recorder, minutes: float) -> None:
        (self._encoder,) = case.encoders
        self._case, self._pace, self._recorder = case, pace, recorder
        step = streamed_step(case)
        self._forwards = [each.forward for each in step.passes[dist.get_rank()]]
        plan = streamed(step)
        self._plan = plan.work[dist.get_rank()]
        self._numbers = {name: number for number, name in enumerate(step.names)}
        self._trains = step.trains
        owners = {
            (one.microbatch, one.piece): replica
            for replica, work in enumerate(plan.work)
            for one in work
            if one.forward
        }
        self._pieces = ExchangeSpec(
            tokens=(TOKENS,) * len(step.names),
            shares=tuple((Share(encoder_replica=owners[name]),) for name in step.names),
            width=HIDDEN,
            dtype=torch.float32,
        )
        groups = create_pipeline_groups(
            case.decoder.groups("pp"),
            virtual=case.chunks > 1,
            device=_CPU,
            timeout_minutes=minutes,
        )
        edge = Edge(replicas=tuple((rank,) for rank in range(case.ranks)), consumers=(0,))
        of_pieces = create_piece_groups(
            self._encoder.name, [edge], device=_CPU, timeout_minutes=minutes
        )
        assert groups is not None
        assert of_pieces is not None
        self._groups = groups
        self._edges = PieceEdges(
            edge,
            of_pieces,
            window=_WINDOW,
            device=_CPU,
            recorder=recorder,
        )
        self._left: deque[EncoderWork] = deque()

    def around(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule, with the plan's work in its bubbles."""

        def forward_backward(*, model: Any, **options: Any) -> Any:
            self._left.extend(self._plan)
            self._edges.begin(self._pieces, trains=self._trains)
            chunk = model[0] if isinstance(model, list) else model
            communicator = BubbleCommunicator(
                parallel_state.get_pipeline_model_parallel_group(),
                chunk.config,
                groups=self._groups,
                forwards=self._forwards,
                work=self,
                recorder=self._recorder,
            )
            result = schedule(
                model=model,
                p2p_communicator=communicator,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
                **options,
            )
            communicator.finish()
            self._edges.drain()
            assert not self._left, self._left
            return result

        return forward_backward

    def before_pass(self, number: int) -> None:
        """What the plan has there."""
        while self._left and self._left[0].before <= number:
            one = self._left.popleft()
            piece = self._numbers[one.microbatch, one.piece]
            if one.forward:
                self._sleep(one)
                self._edges.send_features(piece, torch.ones(TOKENS, HIDDEN))
            else:
                self._edges.receive_gradient(piece)
                self._sleep(one)

    def features(self, number: int) -> Features:
        """Of all pieces of a microbatch together, [TOKENS, HIDDEN]."""
        rows = sum(self._edges.receive_features(each) for each in self._of(number))
        assert isinstance(rows, Tensor)
        if self._trains:
            leaf = torch.zeros((), requires_grad=True)
            rows = _GivesBack.apply(leaf, rows, lambda back: self._give_back(number, back))
        return Features(embeddings=rows, deepstack=())

    def _give_back(self, number: int, gradient: Tensor) -> None:
        for each in self._of(number):
            self._edges.send_gradient(each, gradient)

    def _of(self, microbatch: int) -> Sequence[int]:
        return [number for name, number in self._numbers.items() if name[0] == microbatch]

    def _sleep(self, one: EncoderWork) -> None:
        time = self._encoder.time
        of_microbatch = time.forward if one.forward else time.backward
        self._pace.sleep(
            of_microbatch / self._case.pieces,
            encoder=True,
            backward=not one.forward,
            microbatch=one.microbatch,
        )


class _GivesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rows: Tensor, back: Callable[[Tensor], None]) -> Tensor:
        ctx.back = back
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.back(gradient)
        return None, None, None
