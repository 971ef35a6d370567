"""What is being sent is kept until it has gone, and no more of it than may be under way."""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.hetero.operations import Cargo
from loongplug.hetero.piece_routes import state_moves
from loongplug.hetero.wire import Sends, Wire

MOST, MICROBATCHES, ROWS, WIDTH = 3, 12, 4, 5
LATE = 0.3  # seconds, in which a rank that nothing holds back would have sent all
CPU = torch.device("cpu")


class Work:
    """A send; the host hears that it is done as from one of the backends."""

    def __init__(self, *, backend: str) -> None:
        self.backend = backend
        self.gone = False
        self.waited = self.looked = 0

    def wait(self) -> None:
        self.waited += 1
        if self.backend == "gloo":
            assert self.waited == 1, "gloo waits for one more message"
            self.gone = True

    def is_completed(self) -> bool:
        self.looked += 1
        if self.backend == "nccl" and self.waited and self.looked > 3:  # the device's time
            self.gone = True
        return self.gone


def sent(backend: str, microbatches: list[int]) -> tuple[Sends, list[Any]]:
    sends, works = Sends(most=MOST), []
    for number in microbatches:
        works.append(Work(backend=backend))
        sends.add(works[-1], torch.zeros(1), microbatch=number)
    return sends, works


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_host_waits_for_the_oldest_microbatch_when_too_many_are_under_way(backend: str) -> None:
    """Two messages of each, which wait for all of the one that is ``MOST`` before."""
    sends, works = sent(backend, [0, 0, 1, 1, 2, 2])
    assert len(sends._under_way) == 6
    assert not any(each.waited for each in works)
    last: Any = Work(backend=backend)
    sends.add(last, torch.zeros(1), microbatch=3)
    assert [each.gone for each in works] == [True, True, False, False, False, False]
    assert len(sends._under_way) == 5
    sends.drain()
    assert all(each.waited for each in [*works, last])
    assert not len(sends._under_way)


@pytest.mark.quick
def test_what_has_gone_by_itself_is_let_go_of_and_nobody_waits() -> None:
    sends, works = sent("nccl", [0, 1, 2])
    works[0].gone = works[1].gone = True
    more: Any = Work(backend="nccl")
    sends.add(more, torch.zeros(1), microbatch=2)
    assert len(sends._under_way) == 2
    assert works[0].waited == works[1].waited == 1  # which says if it has failed
    assert not works[2].waited


@pytest.mark.quick
def test_microbatches_without_messages_count() -> None:
    sends, works = sent("gloo", [0, 4, 6])
    assert [each.gone for each in works] == [True, False, False]
    assert len(sends._under_way) == 2


@contextmanager
def alive() -> Iterator[list[int]]:
    """At each send, how many of what was sent so far there are, the new one among them."""
    made: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []
    isend = dist.isend

    def counted(rows: torch.Tensor, **to: Any) -> Any:
        made.append(weakref.ref(rows))
        counts.append(sum(each() is not None for each in made))
        return isend(rows, **to)

    dist.isend = counted  # type: ignore[assignment]
    yield counts
    dist.isend = isend


def states_to_a_slow_stage(rank: int) -> list[int]:
    """From an encoder's first stage to the second; how many messages there were at each send."""
    wire = Wire({Cargo.STATES: dist.new_group([0, 1])}, most=MOST, device=CPU)
    time.sleep(LATE * rank)
    states, links = [(ROWS, number) for number in range(MICROBATCHES)], {(0, 1): WIDTH}
    moves = state_moves(Cargo.STATES, states, links, rank=rank, dtype=torch.float32)
    wire.begin({Cargo.STATES: moves})
    with alive() as counts:
        for number in range(MICROBATCHES):
            if rank:
                assert (wire.receive(Cargo.STATES, number) == number).all()
            else:
                wire.send(Cargo.STATES, number, torch.full((ROWS, WIDTH), float(number)))
        wire.drain()
    return counts


def test_who_has_no_gradients_is_ahead_of_a_slow_receiver_by_the_bound_alone() -> None:
    """Those of ``MOST`` microbatches, and the one that sets out."""
    counts, _ = run_ranks(states_to_a_slow_stage, 2)
    assert counts == [*range(1, MOST + 1), *[MOST + 1] * (MICROBATCHES - MOST)]
