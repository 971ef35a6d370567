"""Faults that a GPU would show and CPU ranks cannot, each put back on purpose: it is found."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron.core
import pytest
import torch
import torch.distributed as dist
from parity.built_in import Fault, around, at
from parity.cells import Cell
from parity.matrix import Matrix
from parity.placed import placed
from ranks import RankError, run_ranks
from torch import Tensor
from toy_step import Model, executor_of, run_step

import loongplug
from loongplug.hetero.operations import Cargo, Kept
from loongplug.hetero.policies import separated
from loongplug.platform.prefetch import Copies
from stand_in.device import enter
from stand_in.runs import train, trained, trained_as_launched
from stand_in.waits import PARTS, Wait, not_needed

ONE = Cell(model="qwen3_vl_tiny")
TP2 = Cell(model="qwen3_vl_tiny", encoder_tp=2, tp=2, sequence_parallel=True)
PP2 = Cell(model="qwen3_vl_tiny", mode="full-hetero-dp", pp=2)
STAGES = placed("1/1/1|1/2/1")
TENSORS = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1"),
    *("--offload-tensors", "fc1_output", "fc2_input"),
)
MISSING = r"has not waited for it|without having waited"
OF_THE_HOST = "No backend type associated with device type cpu|a tensor on the host"
UNDER_WAY: list[Any] = []  # what nobody waits for is not freed


def run(
    matrix: Matrix, cell: Cell, more: tuple[str, ...] = (), **options: Any
) -> list[dict[Wait, int]]:
    flags = [*matrix.base(cell), *cell.flags(), "--train-iters", "1", *more]
    return train(trained, flags, ranks=cell.ranks, **options)


@at("loongplug.training.provider:ModelProvider._complete")
def weights_are_loaded_on_the_host(original: Any, self: Any) -> None:
    for chunk in self.chunks:
        chunk.cpu()
    original(self)


@at("loongplug.training.forward_step:ForwardStep.__call__")
def weights_of_the_loss_are_made_on_the_host(original: Any, *args: Any, **options: Any) -> Any:
    output, loss = original(*args, **options)
    return output, lambda losses: loss(losses * torch.ones(losses.shape))


def forgets(method: str, wait: str) -> Fault:
    """Inside of a ``method`` of the queue of tensors, a ``wait`` of the copies does nothing."""

    @at(f"loongplug.platform.prefetch:PrefetchQueue.{method}")
    def forgetful(original: Any, *args: Any, **options: Any) -> Any:
        with patch.object(Copies, wait, lambda self, *args: None):
            return original(*args, **options)

    return forgetful


@at("torch.distributed:all_to_all_single")
def nobody_waits_for_the_exchange(original: Any, *args: Any) -> None:
    UNDER_WAY.append(original(*args, async_op=True))


@at("torch.distributed:all_to_all_single")
def features_are_exchanged_on_the_host(
    original: Any, target: Tensor, source: Tensor, *args: Any
) -> None:
    original(target, source.cpu(), *args)


class Unawaited:
    """What moves a message, and lets whoever waits for it go on at once."""

    def __init__(self, work: Any) -> None:
        UNDER_WAY.append(work)

    def wait(self) -> None:
        """Not at all."""


def nobody_waits_for(kind: Cargo) -> Fault:
    @at("loongplug.hetero.wire:Wire._post")
    def posted(original: Any, self: Any, what: Cargo) -> None:
        original(self, what)
        for coming in self.ways[what].under_way.values() if what is kind else ():
            coming[:] = [(message, rows, Unawaited(work)) for message, rows, work in coming]

    return posted


@at("loongplug.hetero.wire:Wire.send")
def states_are_sent_from_the_host(
    original: Any, self: Any, what: Cargo, piece: int, rows: Tensor
) -> None:
    original(self, what, piece, rows.cpu() if what is Cargo.STATES else rows)


# What each ends a run of a cell with; those of a sweep are run with --all.
ENDS = {
    "host's weights": (TP2, weights_are_loaded_on_the_host, OF_THE_HOST),
    "host's loss": (ONE, weights_of_the_loss_are_made_on_the_host, "to be on the same device"),
    "exchange": (PP2, nobody_waits_for_the_exchange, MISSING),
    "states": (STAGES, nobody_waits_for(Cargo.STATES), MISSING),
    "take": (ONE, forgets("take", "wait"), f"{MISSING}|are not finite"),
}
SWEPT = {
    "leave": (ONE, forgets("leave", "follow"), f"{MISSING}|are not finite"),
    "let go": (ONE, forgets("let_go", "wait"), f"{MISSING}|are not finite"),
    "send for": (ONE, forgets("send_for", "follow"), f"{MISSING}|are not finite"),
    "features": (STAGES, nobody_waits_for(Cargo.FEATURES), MISSING),
    "host's features": (PP2, features_are_exchanged_on_the_host, OF_THE_HOST),
    "host's states": (STAGES, states_are_sent_from_the_host, OF_THE_HOST),
}


def often(value: Any) -> Any:
    """One of many alike."""
    return pytest.param(value, marks=pytest.mark.sweep)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENDS, *map(often, SWEPT)])
def test_a_fault_ends_the_run(matrix: Matrix, name: str) -> None:
    cell, fault, said = (ENDS | SWEPT)[name]
    with pytest.raises(RankError, match=said):
        run(matrix, cell, more=TENSORS if cell is ONE else (), fault=fault)


def places_of_visual_tokens_are_looked_for_on_the_device(rank: int) -> None:
    def look(original: Any, target: Tensor, rows: Tensor, **options: Any) -> Tensor:
        (rows[:, 0] > 0).nonzero()
        return original(target, rows, **options)

    for module in ("features", "decoder"):
        around(f"loongplug.models.{module}:place", look)


@at("loongplug.hetero.exchange:AllToAll.gather_variable_shape_embeddings")
def features_are_looked_at_before_they_travel(
    original: Any, self: Any, payloads: Any, units: Any
) -> Any:
    for each in payloads.values():
        each.sum().item()
    return original(self, payloads, units)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "fault", "part", "kind"),
    [
        (TP2, places_of_visual_tokens_are_looked_for_on_the_device, "forward", "nonzero"),
        (PP2, features_are_looked_at_before_they_travel, "phase 1", "item"),
    ],
)
def test_a_wait_in_the_step(matrix: Matrix, cell: Cell, fault: Fault, part: str, kind: str) -> None:
    """And none without the fault."""
    assert not any(not_needed(found) for found in run(matrix, cell))
    waits = {wait for found in run(matrix, cell, fault=fault) for wait in not_needed(found)}
    assert {(wait.part, wait.kind) for wait in waits} == {(part, kind)}


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

    def counting(original: Any, self: Copies, *args: Any) -> None:
        nonlocal waits
        waits += 1
        if waits - 1 != forgotten:
            original(self, *args)

    for name in ("follow", "wait"):
        around(f"loongplug.platform.prefetch:Copies.{name}", counting)
    assert torch.equal(step_of(frozenset({what}), platform), expected), "other numbers"
    torch.cuda.synchronize()
    torch.ones(4, device=platform.device).add_(1)  # tells of memory that was given away too early
    return waits


WAITS = {Kept.FEATURES: 16, Kept.ACTIVATIONS: 12, Kept.STATE: 4}
# These come behind another, with nothing given to the computation in between: features sent for
# when they have just left, and the second unit's; all gradients sent for when the last has left;
# the second unit's activations sent for when the first one's have come.
AGAIN: dict[Kept, set[int]] = {Kept.FEATURES: {2, 4, 14}, Kept.ACTIVATIONS: {8}, Kept.STATE: set()}


@pytest.mark.slow
@pytest.mark.parametrize("what", [often(Kept.FEATURES), often(Kept.ACTIVATIONS), Kept.STATE])
def test_each_missing_wait_of_an_offload(what: Kept) -> None:
    (waits,) = run_ranks(travel, 1, timeout=120.0, what=what, forgotten=None)
    assert waits == WAITS[what]
    for forgotten in sorted({*range(waits)} - AGAIN[what]):
        with pytest.raises(RankError, match=f"{MISSING}|other numbers"):
            run_ranks(travel, 1, timeout=120.0, what=what, forgotten=forgotten)


def a_copy_stream_is_made_with_its_queue(rank: int) -> None:
    """Before Megatron has chosen the rank's device."""

    def eager(self: Copies) -> None:
        vars(self)["_stream"] = torch.cuda.Stream()

    Copies.__init__ = eager  # type: ignore[method-assign]


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
