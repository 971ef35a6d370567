"""Whole runs in which decoder layers keep less: no bit differs, bytes do."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lazy_copies import LazyCopies
from parity.bits import BitWatch, first_difference
from ranks import run_ranks
from sweeps import sweep
from test_overlap_run import BALANCED, DELAYED, EP2, ETP2, FULL, OVERLAP, SHARED, TP2, VPP2
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loongplug.models.layers.mlp import ExpertLayer
from loongplug.platform.platforms import CpuPlatform
from loongplug.platform.prefetch import Movable, PrefetchQueue
from loongplug.schedule.tensor_names import NAMES, RECOMPUTED
from loongplug.schedule.tensor_offload import LayerTensors
from loongplug.training.run import run

pytestmark = pytest.mark.slow

LET_GO = ("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1")
TWICE = ("--recompute-granularity", "selective", "--recompute-modules", *RECOMPUTED)
DROPOUT = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2")
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "plain": (1, (), ()),
    "overlap-tp2-full": (2, (*EP2, *TP2, FULL, SHARED), (OVERLAP,)),
    "overlap-vpp2": (4, (*EP2, *VPP2), (OVERLAP,)),
    "recompute-etp2": (
        4,
        (*EP2, *TP2, *ETP2, *BALANCED, *DROPOUT, SHARED),
        (OVERLAP, *TWICE, DELAYED),
    ),
    "recompute-vpp2-full": (4, (*EP2, *VPP2, FULL, *DROPOUT), (OVERLAP, *TWICE, DELAYED)),
}
# Of what is computed twice, its inputs are kept.
LEFT_TWICE = {"layer_input", "pre_mlp_layernorm_input", "dispatched_input"}


class Watch:
    """What left, by name, and how many bytes of it are on the device at a time."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()  # storages
        self.names: dict[int, str] = {}  # of storages
        self.most = 0  # bytes of what left, there at one time
        self.largest = 0  # bytes of one layer
        self.there: dict[int, tuple[StorageWeakRef, int]] = {}

    def out(self, tensors: Sequence[Movable]) -> None:
        storages = [each.device.untyped_storage() for each in tensors if each.device is not None]
        self.left.update(self.names[each._cdata] for each in storages)
        self.largest = max(self.largest, sum(each.nbytes() for each in storages))
        self.note(tensors)

    def note(self, tensors: Sequence[Movable]) -> None:
        self._note(each.device for each in tensors if each.device is not None)

    def _note(self, tensors: Any) -> None:
        for each in tensors:
            storage = each.untyped_storage()
            self.there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        there = sum(nbytes for ref, nbytes in self.there.values() if not ref.expired())
        self.most = max(self.most, there)


def watched(rank: int, *, flags: list[str], late: bool) -> dict[str, Any]:
    """The run's numbers, and what left."""
    watch = Watch()
    leave, send_for = PrefetchQueue.leave, PrefetchQueue.send_for

    def noting_out(self: PrefetchQueue, lots: Any) -> None:
        for tensors in lots.values():
            watch.out(tensors)
        leave(self, lots)

    def noting_back(self: PrefetchQueue, *names: Any) -> None:
        lots = [self._lots[name] for name in names if name in self._lots]
        away = [each for lot in lots for each in lot.items if each.device is None]
        send_for(self, *names)
        watch.note(away)

    passes = LayerTensors.passes

    def noting_name(self: LayerTensors, name: str, tensor: Tensor) -> None:
        watch.names[tensor.untyped_storage()._cdata] = name
        passes(self, name, tensor)

    def noting_release(self: CpuPlatform, storage: torch.UntypedStorage) -> None:
        watch.there.pop(storage._cdata)
        release(self, storage)

    computed, compute = Counter[str](), ExpertLayer.routed_experts_compute

    def counting(self: ExpertLayer, *inputs: Any) -> Any:
        computed["experts"] += 1
        return compute(self, *inputs)

    ExpertLayer.routed_experts_compute = counting
    release = CpuPlatform.release
    CpuPlatform.release = noting_release
    LayerTensors.passes = noting_name
    PrefetchQueue.leave, PrefetchQueue.send_for = noting_out, noting_back
    if late:
        CpuPlatform.copies = lambda self: LazyCopies()
    bits = BitWatch()
    run(flags, watch=bits)
    return {
        "bits": bits.ended(),
        "left": watch.left,
        "most": watch.most,
        "largest": watch.largest,
        "computed": computed["experts"],
    }


@pytest.fixture(scope="module")
def flags(flags):
    return [
        *flags,
        *("--model-name", "qwen3_vl_moe_tiny", "--bf16", "--use-distributed-optimizer"),
        *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "2"),
    ]


@pytest.mark.parametrize("name", sweep(CASES, but=("overlap-tp2-full",)))
def test_no_bit_differs_and_two_layers_are_there(flags, name):
    ranks, layout, more = CASES[name]
    stays = run_ranks(watched, ranks, flags=[*flags, *layout], late=False, timeout=290.0)
    given = [*flags, *layout, *more, *LET_GO, "--offload-tensors", *NAMES]
    left = run_ranks(watched, ranks, flags=given, late=True, timeout=290.0)
    for one, other in zip(stays, left, strict=True):
        assert first_difference([other["bits"]], [one["bits"]]) == ""
        assert not one["left"]
        assert other["left"].keys() == (LEFT_TWICE if TWICE[0] in more else set(NAMES))
        assert other["computed"] == one["computed"] * (2 if TWICE[0] in more else 1)
        # In the forward a layer that is done and the one before it, which leaves; in the backward
        # the one that is used and the next. Without overlap it is one or the other.
        layers = 4 if OVERLAP in more else 2
        assert 0 < other["most"] <= layers * other["largest"]
