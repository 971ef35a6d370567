"""What a pipeline's stage does in a step, recorded from Megatron's own schedule functions.

The functions run as they are, on objects in the place of tensors: a forward or a backward is noted
and computes nothing, and the communicator notes what it is asked to send and to receive.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import combined_1f1b, schedules, utils
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from loongplug.hetero.operations import (
    BEGIN,
    END,
    Event,
    When,
    backward,
    before_pass,
    forward,
    gradient,
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where a stage stands; ``group`` is how many microbatches each chunk takes in turn.

    With ``overlaps`` one microbatch's forward runs together with another's backward.
    """

    stages: int
    stage: int
    chunks: int
    group: int
    overlaps: bool = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A microbatch's way through one of the rank's chunks, forward or backward."""

    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a stage does at a time: a forward, a backward, or both together."""

    forward: Pass | None = None
    backward: Pass | None = None

    @property
    def name(self) -> str:
        there = (("forward", self.forward), ("backward", self.backward))
        return " with ".join(name for name, each in there if each is not None)


class StageEnd(NamedTuple):
    """One end of a message between stages: of an activation on its way ``forward``, or a gradient.

    The other end is the next stage's or the previous one's, around the pipeline. ``number`` counts
    the stage's ends of a kind.
    """

    forward: bool
    sends: bool
    number: int

    @property
    def to_next(self) -> bool:
        return self.forward == self.sends


class Posted(NamedTuple):
    """These set out, in Megatron's order; nobody waits for them yet."""

    ends: tuple[StageEnd, ...]


class Waited(NamedTuple):
    """The stage goes on when these, which are posted, are done."""

    ends: tuple[StageEnd, ...]


Call = Turn | Posted | Waited


@lru_cache(maxsize=256)
def calls(pipeline: Pipeline, microbatches: int, *, beside_sends: bool = False) -> tuple[Call, ...]:
    """All that a stage does in a step of training, in order.

    With ``beside_sends`` (``overlap_p2p_comm``) virtual stages go on while their output is sent.
    """
    noted: list[Call] = []
    schedule = schedules.forward_backward_pipelining_without_interleaving
    several = pipeline.chunks > 1
    config = ModelParallelConfig(
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=pipeline.chunks if several else None,
        microbatch_group_size_per_vp_stage=pipeline.group if several else None,
        overlap_p2p_comm=beside_sends,
        batch_p2p_comm=not beside_sends,
        variable_seq_lengths=True,
    )
    config.hidden_size = 1
    config.overlap_moe_expert_parallel_comm = pipeline.overlaps
    config.high_priority_a2a_comm_stream = False
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with_peers: dict[str, Any] = {"p2p_communicator": _Communicator(config, pipeline, noted)}
    if pipeline.stages == 1:
        schedule, with_peers = schedules.forward_backward_no_pipelining, {}
    elif several:
        schedule = schedules.forward_backward_pipelining_with_interleaving
    chunks: list[Any] = [nn.Module() for _ in range(pipeline.chunks)]  # virtual stages' stand-ins
    for number, each in enumerate(chunks):
        each.config, each.number, each.model_type = config, number, ModelType.encoder_or_decoder
    with _noted_passes(noted):
        schedule(
            forward_step_func=None,
            data_iterator=chunks if several else None,
            model=chunks if several else chunks[0],
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
            **with_peers,
        )
    return tuple(noted)


def first_stage(args: Namespace) -> Pipeline:
    """The decoder's, in a run with these checked flags."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    return Pipeline(
        stages=stages,
        stage=0,
        chunks=chunks or 1,
        group=(args.microbatch_group_size_per_vp_stage if chunks else None) or stages,
        overlaps=args.overlap_moe_expert_parallel_comm,
    )


def turns(pipeline: Pipeline, microbatches: int) -> Iterator[Turn]:
    """The passes alone: 1F1B, interleaved with several chunks."""
    found = calls(pipeline, microbatches, beside_sends=pipeline.chunks > 1)
    return (each for each in found if isinstance(each, Turn))


def around(turn: Turn) -> Iterator[When | Turn]:
    """A turn of a stage, and the moments of an encoder's plan before and behind it."""
    if turn.forward is not None and turn.forward.chunk == 0:
        yield forward(turn.forward.microbatch)
    if turn.backward is not None and turn.backward.chunk == 0:
        yield backward(turn.backward.microbatch)
    yield turn
    if turn.backward is not None and turn.backward.chunk == 0:
        yield gradient(turn.backward.microbatch)


def events(pipeline: Pipeline, microbatches: int) -> Iterator[When | Turn]:
    """All turns of a stage in a step, and all moments of the plans of its encoders.

    Where two passes are one turn, no plan has moments between passes.
    """
    yield BEGIN
    number = 0
    for number, turn in enumerate(turns(pipeline, microbatches), start=1):
        yield before_pass(number - 1)
        yield from around(turn)
    yield before_pass(number)
    yield END


@lru_cache(maxsize=256)
def forwards_first(decoder: Pipeline, microbatches: int, *, behind: int) -> tuple[int, ...]:
    """Forwards before each backward, on a stage of an encoder that has ranks of its own.

    So many of the encoder's stages are ``behind`` it, and then the ``decoder``'s first one. An
    encoder stays as many ahead as that one needs before its first backward, but does none that it
    takes only behind the next gradient that it gives: in one queue of a GPU, a feature that nobody
    takes yet holds up the gradients behind it. One more may be on its way, and one between two
    stages, so that no stage waits for a gradient that its own next output is needed for (figure
    4(a) and appendix D of the MIMO paper; upstream counts from the sources instead).
    """
    found = [each.event for each in events(decoder, microbatches) if isinstance(each, When)]
    backwards = [place for place, each in enumerate(found) if each is Event.BACKWARD]
    needed = [found[:place].count(Event.FORWARD) for place in backwards]
    most = enumerate([*needed[1:], microbatches])
    return tuple(min(min(needed[0] + n, each) + 1 + behind, microbatches) for n, each in most)


def shortened(pipeline: Pipeline, microbatches: int) -> tuple[list[Turn], list[int]]:
    """A step of so few microbatches that has any pair of turns which the whole step has.

    Beside its turns, the number of the one that each of the whole step's is like; so are the turns
    before the two. What is left out are repetitions of the steady state. The last group may be
    smaller than the others; then two of them are whole.
    """
    whole = [*turns(pipeline, microbatches)]
    first = next(number for number, each in enumerate(whole) if each.backward)  # steady from here
    passes = pipeline.group * pipeline.chunks
    steady = 2 * passes if microbatches % pipeline.group else passes
    left_out = max(0, microbatches * pipeline.chunks - first - steady) // passes
    period = passes if pipeline.overlaps else 2 * passes
    few = [*turns(pipeline, microbatches - left_out * pipeline.group)]
    numbers = [*range(len(few))]
    behind = first + period
    numbers[behind:behind] = left_out * numbers[first:behind]
    return few, numbers


@contextmanager
def _noted_passes(noted: list[Call]) -> Iterator[None]:
    """Megatron's forward and backward note themselves; an output is the pass that made it."""

    def forward(*given: Any, current_microbatch: int, **_: Any) -> tuple[Pass, int]:
        made = Pass(chunk=given[2].number, microbatch=current_microbatch)
        noted.append(Turn(forward=made))
        return made, 0

    def backward(input_tensor: Any, output: Pass, *_: Any) -> str:
        noted.append(Turn(backward=output))
        return "gradient"

    def combined(*given: Any, current_microbatch: int | None = None, **hooks: Any) -> Any:
        model, output = given[2], given[8]
        made = None
        if model is not None:
            assert current_microbatch is not None
            made = Pass(chunk=model.number, microbatch=current_microbatch)
        gradient = None if output is None else "gradient"
        if made is not None and hooks.get("pre_forward"):
            hooks["pre_forward"](made.chunk)
        if output is not None and hooks.get("pre_backward"):
            hooks["pre_backward"](output.chunk)
        noted.append(Turn(forward=made, backward=output))
        if made is not None and hooks.get("post_forward"):
            hooks["post_forward"](made, made.chunk)
        if output is not None and hooks.get("post_backward"):
            hooks["post_backward"](gradient, output.chunk)
        return made, 0, gradient

    # Without torch's process groups each stage would be the first one of one.
    with (
        patch.object(schedules, "forward_step", forward),
        patch.object(schedules, "backward_step", backward),
        patch.object(combined_1f1b, "combined_forward_backward_step", combined),
        patch.object(combined_1f1b, "find_megatron_fsdp", lambda _: None),
        patch.object(combined_1f1b, "set_streams", lambda **_: None),
        patch.object(utils, "get_pg_rank", lambda group: group.rank()),
        patch.object(utils, "get_pg_size", lambda group: group.size()),
    ):
        yield


_WAYS = {  # forward, and whether it sends
    "send_next": (True, True),
    "recv_prev": (True, False),
    "send_prev": (False, True),
    "recv_next": (False, False),
}
# Upstream's order on every other stage; else it is the one above.
_ODD = ("recv_prev", "send_next", "recv_next", "send_prev")


class _Communicator(P2PCommunicator):
    def __init__(self, config: ModelParallelConfig, pipeline: Pipeline, noted: list[Call]) -> None:
        # Not upstream's, which asks for a process group's ranks.
        self.config, self._noted, self._counts = config, noted, Counter[str]()
        self.pp_group = SimpleNamespace(size=lambda: pipeline.stages, rank=lambda: pipeline.stage)
        self.virtual_pipeline_model_parallel_size = pipeline.chunks if pipeline.chunks > 1 else None

    def _communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        wanted = {
            "send_next": tensor_send_next is not None,
            "recv_prev": recv_prev,
            "send_prev": tensor_send_prev is not None,
            "recv_next": recv_next,
        }
        names = [name for name in (_ODD if self.current_stage % 2 else _WAYS) if wanted[name]]
        ends = {name: StageEnd(*_WAYS[name], self._counts[name]) for name in names}
        self._counts.update(names)
        if names:
            self._noted.append(Posted(tuple(ends.values())))
            if wait_on_reqs:
                self._noted.append(Waited(tuple(ends.values())))
        handles = {
            name: SimpleNamespace(wait=partial(self._noted.append, Waited((end,))))
            for name, end in ends.items()
        }
        return "activation", "gradient", handles
