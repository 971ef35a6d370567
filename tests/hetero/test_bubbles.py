"""Work in the bubbles: not a bit differs, and receives are under way before it."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import run_ranks
from torch import Tensor, nn

from loongplug.hetero.bubbles import BubbleCommunicator, PipelineGroups, create_pipeline_groups
from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.hetero.step_programs import DecoderPass, decoder_passes
from loongplug.observe.recorder import TraceRecorder
from loongplug.observe.trace_file import TraceEvent

LENGTH, SAMPLES, WIDTH = 3, 2, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline, a step, and what Megatron's flags may say of its messages."""

    stages: int
    chunks: int = 1
    group: int = 0  # of microbatches, of a chunk; 0 for as many as stages
    microbatches: int = 6
    overlap: bool = False
    features: int = 0  # that travel with the hidden states, one less behind each place
    frees: bool = False  # deallocate_pipeline_outputs
    forward_only: bool = False

    def pipeline(self, stage: int) -> Pipeline:
        return Pipeline(
            stages=self.stages, stage=stage, chunks=self.chunks, group=self.group or self.stages
        )

    def passes(self, stage: int) -> tuple[DecoderPass, ...]:
        found = decoder_passes(self.pipeline(stage), self.microbatches)
        if not self.forward_only:
            return found
        return tuple(each for each in found if each.forward)

    def stacked(self, place: int) -> int:
        """Hidden states and features that come to a place of the pipeline."""
        return 1 + max(0, self.features - place)

    def inputs(self, stage: int) -> list[tuple[bool, int]]:
        """Of each pass whether it is a forward, and what is stacked in its input."""
        last, found = self.stages * self.chunks - 1, []
        for forward, place, _ in self.passes(stage):
            comes = place != (0 if forward else last)
            found.append((forward, comes * self.stacked(place if forward else place + 1)))
        return found


FOUR = {
    "pp2": Case(stages=2),
    "pp4": Case(stages=4, frees=True),
    "pp4-few": Case(stages=4, microbatches=2),
    "pp4-features": Case(stages=4, features=3),
    "pp4-evaluates": Case(stages=4, forward_only=True),
    "vpp2": Case(stages=2, chunks=2, overlap=True, frees=True),
    "vpp2-features": Case(stages=2, chunks=2, group=3, overlap=True, features=2),
    "vpp2-evaluates": Case(stages=2, chunks=2, overlap=True, forward_only=True),
    "vpp2-all-ahead": Case(stages=4, chunks=2, microbatches=4, overlap=True),
    "vpp3-large-groups": Case(stages=2, chunks=3, group=4, microbatches=10, overlap=True),
    "vpp2-in-one-go": Case(stages=4, chunks=2, microbatches=8),
    "vpp2-in-one-go-all-ahead": Case(stages=4, chunks=2, microbatches=4),
}


class Chunk(nn.Module):
    """A layer, of the microbatch's numbers or of what the stage before has sent."""

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self, config: ModelParallelConfig, case: Case, *, place: int, noted: "Noted"
    ) -> None:
        super().__init__()
        self.config, self.place, self._noted, self._case = config, place, noted, case
        torch.manual_seed(place)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, microbatch: int) -> Tensor:
        self._noted(f"pass {DecoderPass(True, self.place, microbatch)}")
        hidden = self.input
        if self.place == 0:
            chance = torch.Generator().manual_seed(microbatch)
            shape = LENGTH * self._case.stacked(0), SAMPLES, WIDTH
            hidden = torch.randn(shape, generator=chance)
        assert hidden is not None
        assert len(hidden) == LENGTH * self._case.stacked(self.place)
        made: Tensor = self.layer(hidden).tanh()
        left = LENGTH * self._case.stacked(self.place + 1)
        output = made[:left] + made[-left:]
        if output.requires_grad:
            last = DecoderPass(False, self.place, microbatch)
            output.register_hook(lambda _: self._noted(f"pass {last}"))
        return output


@dataclass
class Noted:
    """What a rank does, in order, and each message by source, target and group."""

    events: list[str] = field(default_factory=list)
    groups: dict[Any, str] = field(default_factory=dict)
    messages: list[tuple[str, int, int, str]] = field(default_factory=list)
    spans: list[TraceEvent] = field(default_factory=list)

    def __call__(self, event: str) -> None:
        self.events.append(event)

    def before_pass(self, number: int) -> None:
        self(f"work {number}")

    def isend(self, original: Any, tensor: Tensor, *, dst: int, group: Any) -> Any:
        name = self.groups[group]
        self.messages.append(("sends", dist.get_rank(), dst, name))
        self(f"send {name}")
        return original(tensor, dst=dst, group=group)

    def irecv(self, original: Any, tensor: Tensor, *, src: int, group: Any) -> Any:
        name = self.groups[group]
        message = "receives", src, dist.get_rank(), name
        self.messages.append(message)
        name = f"{name} {self.messages.count(message) - 1}"
        self(f"post {name}")
        return _NotedWork(original(tensor, src=src, group=group), self, name)


@dataclass
class _NotedWork:
    work: Any
    noted: Noted
    name: str

    def wait(self) -> None:
        self.noted(f"wait {self.name}")
        self.work.wait()


@dataclass(frozen=True, kw_only=True)
class Did:
    """Of one rank: its stage, gradients, losses, and what it noted."""

    stage: int
    values: tuple[Tensor, ...]
    noted: Noted


def config_of(case: Case) -> ModelParallelConfig:
    config = ModelParallelConfig(
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=case.stages,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=case.group or case.stages,
        overlap_p2p_comm=case.overlap,
        batch_p2p_comm=not case.overlap,
        batch_p2p_sync=False,
        variable_seq_lengths=case.features > 0,  # so that stock stages announce their shapes
        deallocate_pipeline_outputs=case.frees,
    )
    config.hidden_size = WIDTH
    return config


def step(case: Case, pipeline: Any, alone: Any, *, groups: PipelineGroups | None) -> Did:
    """One of this rank's, by the stock communicator where there are no ``groups``."""
    config, noted, stage = config_of(case), Noted(), pipeline.rank()
    communicator = P2PCommunicator(pipeline, config)
    if groups is not None:
        recorder = TraceRecorder(noted.spans.extend)
        communicator = BubbleCommunicator(
            pipeline,
            config,
            groups=groups,
            inputs=case.inputs(stage),
            recorder=recorder,
        )
        noted.groups = {group: name for name, group in groups.items()}
    chunks = [
        Chunk(config, case, place=number * case.stages + stage, noted=noted)
        for number in range(case.chunks)
    ]

    def forward_step(data: Iterator[int], chunk: Chunk) -> tuple[Tensor, Any]:
        number = next(data)
        output = chunk(number)

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            found = (output * (number + 1)).square().mean()
            return found, {"loss": found.detach()}

        return output, loss

    collection = ProcessGroupCollection()
    collection.tp = collection.cp = alone
    data = [iter(range(case.microbatches)) for _ in chunks]
    several = case.chunks > 1
    schedule: Any = forward_backward_pipelining_without_interleaving
    if several:
        schedule = forward_backward_pipelining_with_interleaving
    with pytest.MonkeyPatch.context() as patch, ExitStack() as entered:
        if isinstance(communicator, BubbleCommunicator):
            entered.callback(recorder.close)
            entered.enter_context(communicator.working(noted.before_pass))
            for name in ("isend", "irecv"):
                noting = partial(getattr(noted, name), getattr(dist, name))
                patch.setattr(dist, name, noting)
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=data if several else data[0],
            model=chunks if several else chunks[0],
            num_microbatches=case.microbatches,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES,
            forward_only=case.forward_only,
            p2p_communicator=communicator,
            pg_collection=collection,
        )
    values = [each["loss"] for each in losses]
    for chunk in chunks:
        values += [torch.zeros(1) if p.grad is None else p.grad for p in chunk.parameters()]
    noted.groups = {}
    return Did(stage=stage, values=tuple(values), noted=noted)


def both(rank: int, *, cases: dict[str, Case]) -> dict[str, tuple[Did, Did]]:
    """Each case by the stock communicator and by that with work."""
    world = dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(world)][rank]
    found = {}
    made: dict[tuple[int, bool], Any] = {}
    for name, case in cases.items():
        if (case.stages, case.chunks > 1) not in made:
            pipelines = [
                list(range(first, first + case.stages)) for first in range(0, world, case.stages)
            ]
            made[case.stages, case.chunks > 1] = (
                [dist.new_group(each) for each in pipelines][rank // case.stages],
                create_pipeline_groups(pipelines, virtual=case.chunks > 1),
            )
        pipeline, groups = made[case.stages, case.chunks > 1]
        found[name] = (
            step(case, pipeline, alone, groups=None),
            step(case, pipeline, alone, groups=groups),
        )
    return found


@pytest.fixture(scope="module")
def ran() -> list[dict[str, tuple[Did, Did]]]:
    return run_ranks(both, 4, cases=FOUR, timeout=240.0)


@pytest.mark.parametrize("name", FOUR)
def test_not_a_bit_differs(ran: list[dict[str, tuple[Did, Did]]], name: str) -> None:
    seen = 0
    for rank in ran:
        stock, bubbles = rank[name]
        assert len(stock.values) == len(bubbles.values)
        for one, other in zip(stock.values, bubbles.values, strict=True):
            assert torch.equal(one, other)
            seen += bool(one.any())
    assert seen


@pytest.mark.parametrize("name", FOUR)
def test_messages_are_under_way_beside_the_work(
    ran: list[dict[str, tuple[Did, Did]]], name: str
) -> None:
    """Receives are posted before it and waited for behind it; what a pass made sets out before."""
    case, sent = FOUR[name], 0
    last = case.stages * case.chunks - 1
    in_one_go = case.chunks > 1 and not case.overlap
    for rank in ran:
        did = rank[name][1]
        events, passes = did.noted.events, case.passes(did.stage)
        for what, done in (("work", range(len(passes) + 1)), ("pass", passes)):
            assert [x for x in events if x.startswith(what)] == [f"{what} {each}" for each in done]
        taken: defaultdict[str, int] = defaultdict(int)
        for number, each in enumerate(passes):
            begin, work = events.index(f"pass {each}"), events.index(f"work {number}")
            kind = "activations" if each.forward else "gradients"
            if each.place != (0 if each.forward else last):  # another stage sends its input
                around = did.stage == (0 if each.forward else case.stages - 1)
                group = kind + "_around" * around
                message = f"{group} {taken[group]}"
                taken[group] += 1
                posted, waited = events.index(f"post {message}"), events.index(f"wait {message}")
                assert posted < work < waited < begin
            if in_one_go and each.forward and not passes[number + 1].forward:
                continue  # its output sets out with what the backward behind it makes
            before_more = events[begin : events.index(f"work {number + 1}")]
            found = any(event.startswith(f"send {kind}") for event in before_more)
            assert found == (each.place != (last if each.forward else 0))
            sent += found
    assert sent


@pytest.mark.parametrize("name", FOUR)
def test_a_pair_s_messages_in_a_group_go_one_way_and_all_arrive(
    ran: list[dict[str, tuple[Did, Did]]], name: str
) -> None:
    ends: defaultdict[tuple[int, int, str], dict[str, int]] = defaultdict(
        lambda: {"sends": 0, "receives": 0}
    )
    for rank in ran:
        for end, source, target, group in rank[name][1].noted.messages:
            ends[source, target, group][end] += 1
    assert ends
    for (source, target, group), counts in ends.items():
        assert counts["sends"] == counts["receives"] > 0
        assert (target, source, group) not in ends


@pytest.mark.parametrize("name", FOUR)
def test_a_trace_has_every_message_at_both_ends(
    ran: list[dict[str, tuple[Did, Did]]], name: str
) -> None:
    """By the details that arrows of a trace are drawn from."""
    found: defaultdict[tuple[str, int, int], dict[str, list[int]]] = defaultdict(
        lambda: {"sent": [], "received": []}
    )
    for number, rank in enumerate(ran):
        for event in rank[name][1].noted.spans:
            for what, sent, received in (
                ("forward", ("sent_next", "next"), ("received_previous", "previous")),
                ("backward", ("sent_previous", "previous"), ("received_next", "next")),
            ):
                for end, (size, side) in (("sent", sent), ("received", received)):
                    if size in event.details:
                        other = event.details[side]
                        ends = (number, other) if end == "sent" else (other, number)
                        found[what, *ends][end].append(event.details[size])
    assert found
    for each in found.values():
        assert sorted(each["sent"]) == sorted(each["received"])
        assert all(each["sent"])
