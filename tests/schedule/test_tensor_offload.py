"""Named tensors of layers, on the host meanwhile: the same gradients, memory let go, in time."""

from types import SimpleNamespace

import pytest
import torch
from lazy_copies import LazyCopies, poison
from torch import Tensor, nn

from loongplug.platform.prefetch import Copies, PrefetchQueue
from loongplug.schedule.tensor_offload import LayerTensors, TensorOffload

pytestmark = pytest.mark.quick

ROWS, WIDTH, LAYERS, MICROBATCHES = 6, 16, 3, 4
# Forwards and backwards of microbatches: one by one, as a pipeline's first stage, and all first.
SCHEDULES = {
    "in turn": "F0 B0 F1 B1 F2 B2 F3 B3",
    "pipeline": "F0 F1 B0 F2 B1 F3 B2 B3",
    "backwards": "F0 F1 F2 F3 B3 B2 B1 B0",
}


class Layer(nn.Module):
    """Two parts; names the norm's result, which is saved twice, and two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def attend(self, hidden: Tensor, offload: TensorOffload) -> Tensor:
        normed = self.norm(hidden)
        offload.name("norm", normed)
        return self.first(normed) * torch.cat([normed, normed], dim=1).sin()

    def mix(self, both: Tensor, offload: TensorOffload) -> Tensor:
        left, right = both.chunk(2, dim=1)
        offload.name("halves", left)
        offload.name("halves", right)
        return self.second(left * right.tanh())


class Chunk(nn.Module):
    def __init__(self, *, in_nodes: bool = False) -> None:
        super().__init__()
        self.in_nodes = in_nodes
        torch.manual_seed(5)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, hidden: Tensor, offload: TensorOffload) -> Tensor:
        next_layer = offload.begin_pass(in_nodes=self.in_nodes)
        for layer in self.layers:
            tensors = next_layer()
            with tensors.forward():
                both = layer.attend(hidden, offload)
            with tensors.forward():
                hidden = hidden + layer.mix(both, offload)
            tensors.forward_done()
        return hidden


def offload_by(copies: Copies, *, least: int = 1) -> TensorOffload:
    platform = SimpleNamespace(copies=lambda: copies, release=poison_storage)
    return TensorOffload(names=["norm", "halves"], platform=platform, least=least)


def poison_storage(storage: torch.UntypedStorage) -> None:
    poison(torch.empty(0, dtype=torch.uint8).set_(storage))


def inputs(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(
    copies: Copies,
    *,
    schedule: str = "pipeline",
    steps: int = 2,
    least: int = 1,
    in_nodes: bool = False,
) -> Tensor:
    """Of all weights after ``steps``."""
    chunk = Chunk(in_nodes=in_nodes)
    offload = offload_by(copies, least=least)
    for _ in range(steps):
        outputs = {}
        for what in SCHEDULES[schedule].split():
            number = int(what[1:])
            if what[0] == "F":
                outputs[number] = chunk(inputs(number), offload)
            else:
                output = outputs.pop(number)
                output.backward(torch.full_like(output, number + 1))
    return torch.cat([each.grad.flatten() for each in chunk.parameters()])


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """Where nothing is large enough to leave."""
    return {schedule: gradients(Copies(), schedule=schedule, least=10**6) for schedule in SCHEDULES}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("copies", [LazyCopies, Copies])
@pytest.mark.parametrize("in_nodes", [False, True])
def test_gradients_are_those_of_tensors_that_stay(expected, copies, schedule, in_nodes):
    found = gradients(copies(), schedule=schedule, in_nodes=in_nodes)
    assert torch.equal(found, expected[schedule])


class Noting(Copies):
    """What travels, and when it is sent for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        self.events.append(f"{source.nbytes}")


def test_named_storages_travel_once_and_others_stay():
    """The norm's result [rows, width] and what two views have of [rows, 2 * width]."""
    copies = Noting()
    gradients(copies, schedule="backwards", steps=1)
    one = ROWS * WIDTH * 4
    assert set(copies.events) == {str(one), str(2 * one)}
    # Out: all layers of all microbatches. Back: all but the last, which had not left.
    passes = LAYERS * MICROBATCHES
    assert len(copies.events) == 2 * (passes + passes - 1)
    copies = Noting()
    gradients(copies, schedule="backwards", steps=1, least=one + 1)
    assert set(copies.events) == {str(2 * one)}


def noted_orders(monkeypatch, schedule: str) -> list[list[tuple[str, int, int]]]:
    """Of each step, what is sent for and what is used: pass and layer."""
    steps: list[list[tuple[str, int, int]]] = []
    places: dict[LayerTensors, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    made, sent, brought = LayerTensors.__init__, PrefetchQueue.send_for, TensorOffload.bring

    def noting_made(self, offload, number, *, in_nodes):
        made(self, offload, number, in_nodes=in_nodes)
        places[self] = number, counts.get(number, 0) % LAYERS
        counts[number] = counts.get(number, 0) + 1

    def noting_sent(self, *layers):
        for layer in layers:
            if layer in self._lots and self._lots[layer].items[0].device is None:
                steps[-1].append(("send", *places[layer]))
        sent(self, *layers)

    def noting_brought(self, layer, *, number):
        if layer in self._open:
            steps[-1].append(("use", *places[layer]))
        brought(self, layer, number=number)

    monkeypatch.setattr(LayerTensors, "__init__", noting_made)
    monkeypatch.setattr(PrefetchQueue, "send_for", noting_sent)
    monkeypatch.setattr(TensorOffload, "bring", noting_brought)
    chunk = Chunk()
    offload = offload_by(Copies())
    for _ in range(2):
        steps.append([])
        outputs = {}
        for what in SCHEDULES[schedule].split():
            number = int(what[1:])
            if what[0] == "F":
                outputs[number] = chunk(inputs(number), offload)
            else:
                outputs.pop(number).sum().backward()
    return steps


@pytest.mark.parametrize("schedule", ["pipeline", "backwards"])
def test_each_layer_is_sent_for_when_the_one_before_it_goes_backward(monkeypatch, schedule):
    """In the first step but for each pass's first, in the second for all but the very first."""
    first, second = noted_orders(monkeypatch, schedule)
    for events, late in ((first, MICROBATCHES), (second, 1)):
        uses = [event[1:] for event in events if event[0] == "use"]
        assert len(uses) == LAYERS * MICROBATCHES
        demanded = 0
        for place, (what, *where) in enumerate(events):
            if what != "send":
                continue
            users = [event for event in events[:place] if event[0] == "use"]
            turn = uses.index(tuple(where))
            assert len(users) in (turn, turn + 1)
            demanded += len(users) == turn + 1  # sent for when it was used already
        assert demanded <= late


def test_nothing_leaves_without_a_backward_to_come():
    copies = Noting()
    offload = offload_by(copies)
    with torch.no_grad():
        Chunk()(inputs(0), offload)
    assert copies.events == []
