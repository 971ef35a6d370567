"""Faults that a GPU would show and CPU ranks cannot, each put back on purpose: it is found."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
import torch.distributed as dist
from parity.cells import Cell
from parity.matrix import Matrix
from parity.placed import placed
from ranks import RankError, run_ranks
from torch import Tensor
from toy_step import Model, executor_of, run_step

import loongplug
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.operations import Cargo, Kept
from loongplug.hetero.policies import separated
from loongplug.hetero.wire import Wire
from loongplug.models import features
from loongplug.platform.copies import CudaCopies
from loongplug.platform.prefetch import PrefetchQueue
from loongplug.training.forward_step import ForwardStep
from loongplug.training.provider import ModelProvider
from stand_in.device import enter
from stand_in.runs import train, trained, trained_as_launched
from stand_in.waits import PARTS, Wait, not_needed

TP2 = Cell(model="qwen3_vl_tiny", encoder_tp=2, tp=2, sequence_parallel=True)


def run(
    matrix: Matrix, cell: Cell, more: tuple[str, ...] = (), **options: Any
) -> list[dict[Wait, int]]:
    flags = [*matrix.base(cell), *cell.flags(), "--train-iters", "1", *more]
    return train(trained, flags, ranks=cell.ranks, **options)


def weights_are_loaded_on_the_host() -> None:
    complete = ModelProvider._complete

    def fault(self: ModelProvider) -> None:
        for chunk in self.chunks:
            chunk.cpu()
        complete(self)

    ModelProvider._complete = fault  # type: ignore[method-assign]


def places_of_visual_tokens_are_looked_for_on_the_device() -> None:
    place = features.place

    def fault(target: Tensor, rows: Tensor, **options: Any) -> Tensor:
        (rows[:, 0] > 0).nonzero()
        return place(target, rows, **options)

    features.place = fault
    from loongplug.models import decoder

    decoder.place = fault


def weights_of_the_loss_are_made_on_the_host() -> None:
    call = ForwardStep.__call__

    def fault(self: ForwardStep, *args: Any, **options: Any) -> Any:
        output, loss = call(self, *args, **options)
        return output, lambda losses: loss(losses * torch.ones(losses.shape))

    ForwardStep.__call__ = fault  # type: ignore[method-assign]


@pytest.mark.slow
def test_weights_that_are_loaded_while_their_module_is_on_the_host(matrix: Matrix) -> None:
    with pytest.raises(RankError, match="not on stand_in:"):
        run(matrix, TP2, fault=weights_are_loaded_on_the_host)


@pytest.mark.slow
def test_a_wait_in_the_forward(matrix: Matrix) -> None:
    """And none without the fault."""
    for found in run(matrix, TP2):
        assert not not_needed(found)
    for found in run(matrix, TP2, fault=places_of_visual_tokens_are_looked_for_on_the_device):
        (wait,) = not_needed(found)
        assert (wait.part, wait.kind) == ("forward", "nonzero")


def features_are_looked_at_before_they_travel() -> None:
    gather = AllToAll.gather_variable_shape_embeddings

    def fault(self: AllToAll, payloads: Any, units: Any) -> Any:
        for each in payloads.values():
            each.sum().item()
        return gather(self, payloads, units)

    AllToAll.gather_variable_shape_embeddings = fault  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_wait_in_phase_1(matrix: Matrix) -> None:
    """And none without the fault."""
    assert not any(not_needed(found) for found in run(matrix, PP2))
    found = run(matrix, PP2, fault=features_are_looked_at_before_they_travel)
    waits = [wait for each in found for wait in not_needed(each)]
    assert waits
    assert {wait.part for wait in waits} == {"phase 1"}


def test_parts_of_a_step_are_functions_that_there_are() -> None:
    packages = (Path(loongplug.__file__).parent, Path(str(megatron.core.__path__[0])).parent)
    for file, function in PARTS:
        sources = [
            path.read_text()
            for package in packages
            for path in (package / file, package / "core" / file)
            if path.exists()
        ]
        assert any(f"def {function}(" in source for source in sources), (file, function)


@pytest.mark.slow
def test_a_tensor_of_the_host_in_the_loss(matrix: Matrix) -> None:
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        run(matrix, Cell(model="qwen3_vl_tiny"), fault=weights_of_the_loss_are_made_on_the_host)


def step_of(on_host: frozenset[Kept], platform: Any) -> Tensor:
    """Losses and gradients of one step of a toy, on the host."""
    with torch.device(platform.device):
        model = Model()
    executor = executor_of(
        separated, platform.copies(), on_host=on_host, device=platform, last_stage=False
    )
    begin = executor.begin

    def updated(chunk: Any, microbatches: Any, *, training: bool) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)  # as an optimizer does at the end of the step before
        begin(chunk, microbatches, training=training)

    vars(executor)["begin"] = updated
    losses = run_step(executor, model, [30, 50, 20])
    return torch.cat([torch.stack(losses), model.gradients]).cpu()


def travel(rank: int, *, what: Kept, forgotten: int | None) -> int:
    """How many waits there are, of either stream for the other; one of them does nothing."""
    platform = enter()
    expected = step_of(frozenset(), platform)
    waits = 0

    def counting(name: str) -> None:
        original = getattr(CudaCopies, name)

        def wait(self: CudaCopies, *args: Any) -> None:
            nonlocal waits
            waits += 1
            if waits - 1 != forgotten:
                original(self, *args)

        setattr(CudaCopies, name, wait)

    for name in ("follow", "wait"):
        counting(name)
    assert torch.equal(step_of(frozenset({what}), platform), expected), "other numbers"
    platform.synchronize()
    torch.ones(4, device=platform.device).add_(1)  # tells of memory that was given away too early
    return waits


WAITS = {Kept.FEATURES: 16, Kept.ACTIVATIONS: 12, Kept.STATE: 4}
# These come behind another, with nothing given to the computation in between: features sent for
# when they have just left, and the second unit's; all gradients sent for when the last has left;
# the second unit's activations sent for when the first one's have come.
AGAIN: dict[Kept, set[int]] = {Kept.FEATURES: {2, 4, 14}, Kept.ACTIVATIONS: {8}, Kept.STATE: set()}
MISSING = r"has not waited for it|without having waited"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(Kept.FEATURES, marks=pytest.mark.sweep),
        pytest.param(Kept.ACTIVATIONS, marks=pytest.mark.sweep),
        Kept.STATE,
    ],
)
def test_each_missing_wait_of_an_offload(what: Kept) -> None:
    (waits,) = run_ranks(travel, 1, timeout=120.0, what=what, forgotten=None)
    assert waits == WAITS[what]
    for forgotten in sorted({*range(waits)} - AGAIN[what]):
        with pytest.raises(RankError, match=f"{MISSING}|other numbers"):
            run_ranks(travel, 1, timeout=120.0, what=what, forgotten=forgotten)


def forgets(owner: type, method: str, wait: str) -> Callable[[], None]:
    """Inside of ``method``, a ``wait`` of the copies does nothing."""

    def fault() -> None:
        original = getattr(owner, method)

        def forgetful(self: Any, *args: Any, **options: Any) -> Any:
            kept = getattr(CudaCopies, wait)
            setattr(CudaCopies, wait, lambda self, *args: None)
            try:
                return original(self, *args, **options)
            finally:
                setattr(CudaCopies, wait, kept)

        setattr(owner, method, forgetful)

    return fault


TENSORS = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1"),
    *("--offload-tensors", "fc1_output", "fc2_input"),
)
ONE = Cell(model="qwen3_vl_tiny")
PP2 = Cell(model="qwen3_vl_tiny", mode="full-hetero-dp", pp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "wait"),
    [
        pytest.param("leave", "follow", marks=pytest.mark.sweep),
        pytest.param("let_go", "wait", marks=pytest.mark.sweep),
        pytest.param("send_for", "follow", marks=pytest.mark.sweep),
        ("take", "wait"),
    ],
)
def test_a_missing_wait_of_tensors_that_are_away(matrix: Matrix, method: str, wait: str) -> None:
    with pytest.raises(RankError, match=f"{MISSING}|are not finite"):
        run(matrix, ONE, more=TENSORS, fault=forgets(PrefetchQueue, method, wait))


def exchanged(call: Callable[..., Any]) -> Callable[[], None]:
    """The exchange of features calls this in place of torch's all-to-all."""

    def fault() -> None:
        from loongplug.hetero import exchange

        exchange.dist = SimpleNamespace(  # type: ignore[assignment]
            all_to_all_single=call,
            get_rank=dist.get_rank,
            get_process_group_ranks=dist.get_process_group_ranks,
        )

    return fault


UNDER_WAY: list[Any] = []


def nobody_waits(*args: Any) -> None:
    UNDER_WAY.append(dist.all_to_all_single(*args, async_op=True))


def on_the_host(target: Tensor, source: Tensor, *args: Any) -> None:
    dist.all_to_all_single(target, source.cpu(), *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (nobody_waits, MISSING),
        pytest.param(
            on_the_host,
            "No backend type associated with device type cpu|a tensor on the host",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_faults_of_the_exchange(matrix: Matrix, call: Callable[..., Any], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run(matrix, PP2, fault=exchanged(call))


STAGES = placed("1/1/1|1/2/1")


class Unawaited:
    """What moves a message, and lets whoever waits for it go on at once."""

    def __init__(self, work: Any) -> None:
        UNDER_WAY.append(work)

    def wait(self) -> None:
        """Not at all."""


def nobody_waits_for(kind: Cargo) -> None:
    post = Wire._post

    def posted(self: Wire, what: Cargo) -> None:
        post(self, what)
        for coming in self.ways[what].under_way.values() if what is kind else ():
            coming[:] = [(message, rows, Unawaited(work)) for message, rows, work in coming]

    Wire._post = posted  # type: ignore[method-assign]


def states_are_sent_from_the_host() -> None:
    send = Wire.send

    def sending(self: Wire, what: Cargo, piece: int, rows: Tensor) -> None:
        send(self, what, piece, rows.cpu() if what is Cargo.STATES else rows)

    Wire.send = sending  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(partial(nobody_waits_for, Cargo.FEATURES), MISSING, marks=pytest.mark.sweep),
        (partial(nobody_waits_for, Cargo.STATES), MISSING),
        pytest.param(
            states_are_sent_from_the_host,
            "No backend type associated with device type cpu|a tensor on the host",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_faults_between_modules_and_stages(
    matrix: Matrix, fault: Callable[[], None], said: str
) -> None:
    with pytest.raises(RankError, match=said):
        run(matrix, STAGES, fault=fault)


def a_copy_stream_is_made_with_its_queue() -> None:
    """Before Megatron has chosen the rank's device."""

    def eager(self: CudaCopies) -> None:
        vars(self)["_stream"] = torch.cuda.Stream()

    CudaCopies.__init__ = eager  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_copy_stream_of_another_device(matrix: Matrix) -> None:
    """And none without the fault, nor a wait, with a GPU's own defaults."""
    flags = [*matrix.base(TP2), *TP2.flags(), "--train-iters", "1", *TENSORS]
    for fault in (None, a_copy_stream_is_made_with_its_queue):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launched = partial(
            train, trained_as_launched, flags, ranks=TP2.ranks, port=store.port, fault=fault
        )
        if fault is None:
            assert launched() == [[]] * TP2.ranks
        else:
            with pytest.raises(RankError, match="a stream of stand_in:0 where stand_in:1"):
                launched()
