"""Whole runs with each offload flag: not a bit differs, and memory is let go meanwhile."""

import hashlib
import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import compared_runs
import pytest
import torch
from layout_flags import OVERLAP, PP2, SINGLES, TP2, VPP2
from lazy_copies import LazyCopies
from micro.memory_counter import all_to_alls_apart
from ranks import run_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loongplug.hetero import encoder_state
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.hetero.encoder_state import EncoderState
from loongplug.hetero.exchange import AllToAll
from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.executor import Executor
from loongplug.hetero.operations import Kept
from loongplug.models.features import Features
from loongplug.platform.platforms import CpuPlatform
from loongplug.platform.prefetch import PrefetchQueue
from loongplug.training.run import run

pytestmark = pytest.mark.slow

FEATURES, STATE = "--full-hetero-dp-cpu-offload", "--offload-encoder-state"
ACTIVATIONS = "--offload-encoder-activations"
ALL = (FEATURES, ACTIVATIONS, STATE)
FROZEN = "+model.image_encoder.freeze=True"
# Activations leave unit by unit: the same passes on both sides, for the same bits.
SINGLY = "+model.image_encoder.joined_rows=1"


class Counter:
    """Bytes on this rank, by step: of features, of what encoding saves, of the encoder's state.

    Of a step are known ``features``, what of them was there when phase 2 began and behind each time
    that the decoder took a unit's, and ``units``, what each unit's take; ``saved``, what encoding
    saved, and ``kept``, what of that was there in phase 2. ``away`` is the most of the encoder's
    state that was not there in phase 2.
    """

    def __init__(self) -> None:
        self._features: dict[int, tuple[StorageWeakRef, int]] = {}
        self._saved: dict[int, tuple[StorageWeakRef, int]] = {}
        self._released = self.away = 0
        self.steps: list[dict[str, Any]] = []
        self._in_phase_2 = False

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._features[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def note_saved(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def count(self) -> None:
        if self._in_phase_2:
            self.steps[-1]["features"].append(_alive(self._features))

    def phase_2(self, sizes: list[int]) -> None:
        self.steps.append(
            {
                "features": [],
                "units": list(sizes),
                "saved": sum(nbytes for _, nbytes in self._saved.values()),
                "kept": _alive(self._saved),
            }
        )
        self._in_phase_2 = True
        self.count()

    def phase_3(self) -> None:
        self._in_phase_2 = False
        self._features.clear()
        self._saved.clear()

    def released(self, nbytes: int) -> None:
        self._released += nbytes
        self.away = max(self.away, self._released)


def _alive(noted: dict[int, tuple[StorageWeakRef, int]]) -> int:
    return sum(nbytes for storage, nbytes in noted.values() if not storage.expired())


def around(owner: type, method: str, act: Callable[..., Any]) -> None:
    """Have ``act(result, *arguments)`` called behind a method."""
    original = getattr(owner, method)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act(result, *args, **kwargs)
        return result

    setattr(owner, method, called)


def watched(counter: Counter) -> None:
    """Report to ``counter`` where memory is taken and let go."""

    sizes: list[int] = []

    def arrived(units: dict[int, Tensor], *_: Any) -> None:
        sizes[:] = [units[unit].nbytes for unit in sorted(units)]
        for each in units.values():
            counter.note(each)

    def gathered(_: None, step: ExecutedStep, __: range, **___: Any) -> None:
        for each in step.features.values():
            counter.note(each)

    def came(_: None, queue: PrefetchQueue, *names: Any) -> None:
        for what, unit in names:
            for each in queue._lots[what, unit].items if what is Kept.FEATURES else ():
                counter.note(each.device)

    end = Executor.end

    def ended(executor: Executor) -> None:
        counter.phase_3()
        end(executor)

    saved_view = encoder_state.saved_view

    def saved(tensor: Tensor, known: Any) -> Any:
        counter.note_saved(tensor)
        return saved_view(tensor, known)

    around(EncoderOfStep, "payload", lambda made, *_, **__: counter.note(made))
    around(AllToAll, "gather_variable_shape_embeddings", arrived)
    around(ExecutedStep, "_gather", gathered)
    around(PrefetchQueue, "send_for", came)
    encoder_state.saved_view = saved
    around(Executor, "begin", lambda *_, **__: counter.phase_2(sizes))
    around(Executor, "features", lambda *_: counter.count())
    Executor.end = ended
    around(CpuPlatform, "release", lambda _, __, storage: counter.released(storage.nbytes()))
    around(CpuPlatform, "restore", lambda _, __, storage, nbytes: counter.released(-nbytes))


class Chunks:
    """Watches a run for its chunks and how much the encoder's state takes."""

    def built(self, chunks: Any, optimizer: Any, **_: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer

    def loss(self, *_: Any) -> None:
        pass


def trained(rank: int, *, flags: list[str], late: bool = False) -> dict[str, Any]:
    """Losses, norms, a digest of this rank's parameters, and bytes; copies as late as may be."""
    counter, chunks = Counter(), Chunks()
    watched(counter)
    if late:
        CpuPlatform.copies = lambda self: LazyCopies()
    compared_runs.run = lambda flags: run(flags, watch=chunks)
    with all_to_alls_apart():
        found = compared_runs.steps(rank, flags=flags)
    digest = hashlib.sha256()
    for chunk in chunks.chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode() + bytes_of(parameter))
    part = chunks.chunks[0].parts["image_encoder"]
    state = EncoderState(
        part, chunks.optimizer.of_part["image_encoder"], platform=CpuPlatform.__new__(CpuPlatform)
    )
    return {
        "numbers": (found, digest.hexdigest()),
        "steps": counter.steps,
        "away": counter.away,
        "state": sum(each.device.nbytes for each in state.movable()),
    }


def bytes_of(parameter: Tensor) -> bytes:
    return parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def numbers(ranks: list[dict[str, Any]]) -> list[Any]:
    return [rank["numbers"] for rank in ranks]


def on_device(units: list[int]) -> list[int]:
    """Bytes of features: all units', and behind each taking those of it and of all to come."""
    left = list(accumulate(reversed(units), initial=0))[:0:-1]
    return [sum(units), *left]


def on_host(units: list[int]) -> list[int]:
    """Bytes of features: the first unit's, and behind each taking those of it and of the next."""
    return [sum(units[:1]), *(sum(pair) for pair in pairwise([*units, 0]))]


@pytest.fixture(scope="module")
def flags(flags, demo):
    evaluation = ("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1")
    full = (
        "--enable-full-hetero-dp",
        "--full-hetero-dp-schedule",
        "separated",
        "--train-iters",
        "3",
        *SINGLES,
        SINGLY,
    )
    return [*flags, *full, *evaluation, "--eval-interval", "2"]


def test_each_flag_alone(flags):
    """Two stages of two chunks, eight microbatches whose images one rank consumes."""
    layout = [*flags, *PP2, *VPP2, *OVERLAP]
    plain = run_ranks(trained, 2, flags=layout, timeout=120.0)
    for number, rank in enumerate(plain):
        for step in rank["steps"]:
            assert any(step["units"]) == (number == 0)
            assert step["features"] == on_device(step["units"])
            assert step["saved"] == 0
        assert rank["away"] == 0

    found = run_ranks(trained, 2, flags=[*layout, FEATURES], late=True, timeout=120.0)
    assert numbers(found) == numbers(plain)
    for number, rank in enumerate(found):
        for step in rank["steps"]:
            assert any(step["units"]) == (number == 0)
            assert step["features"] == on_host(step["units"])

    found = run_ranks(trained, 2, flags=[*layout, ACTIVATIONS], late=True, timeout=120.0)
    assert numbers(found) == numbers(plain)
    for rank in found:
        trains = [step for step in rank["steps"] if step["saved"]]
        assert len(trains) == 3
        for step in trains:
            assert step["kept"] == 0

    found = run_ranks(trained, 2, flags=[*layout, STATE], late=True, timeout=120.0)
    assert numbers(found) == numbers(plain)
    for rank in found:
        assert rank["away"] == rank["state"] > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((*PP2, FROZEN, *OVERLAP), id="pp2-frozen"),
        pytest.param((*TP2, "--bf16", "model.image_encoder.recompute=true"), id="tp2-bf16"),
    ],
)
def test_all_flags_together(flags, layout):
    plain = run_ranks(trained, 2, flags=[*flags, *layout], timeout=120.0)
    found = run_ranks(trained, 2, flags=[*flags, *layout, *ALL], late=True, timeout=120.0)
    assert numbers(found) == numbers(plain)
    for rank in found:
        assert rank["away"] == rank["state"] > 0
        assert all(step["features"] == on_host(step["units"]) for step in rank["steps"])
    assert all(max(step["features"]) > 0 for step in found[0]["steps"])
    for rank in plain:
        assert all(step["features"] == on_device(step["units"]) for step in rank["steps"])


def encoder_in_phase_2(rank: int, *, flags: list[str]) -> bool:
    """Whether losses are numbers when features depend on the encoder once more in phase 2."""
    begin, features = Executor.begin, Executor.features

    def noting(self: Any, chunk: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, chunk, *args, **kwargs)
        self.parameter = next(chunk.parts["image_encoder"].module.parameters())

    def using(self: Any, number: int) -> Features:
        found = features(self, number)
        nothing = 0 * self.parameter.detach().sum()
        return Features(embeddings=found.embeddings + nothing, deepstack=found.deepstack)

    Executor.begin, Executor.features = noting, using
    return all(math.isfinite(step.loss) for step in run(flags))


def test_a_use_of_the_encoder_in_phase_2_shows(flags):
    few = [*flags, *TP2, "--train-iters", "2", "--no-check-for-nan-in-loss-and-grad"]
    assert run_ranks(encoder_in_phase_2, 2, flags=few, timeout=120.0) == [True, True]
    assert run_ranks(encoder_in_phase_2, 2, flags=[*few, STATE], timeout=120.0) == [False, False]
