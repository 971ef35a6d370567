"""Whole runs with experts' exchange overlapped: not a bit differs from those without."""

import hashlib
from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel.utils import ScheduleNode
from ranks import run_ranks
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.training.forward_step import LossReport
from loongplug.training.run import run

pytestmark = pytest.mark.slow

OVERLAP = "--overlap-moe-expert-parallel-comm"
EARLY = "--ep-overlap-early-attn-memory-release"  # says how to overlap
EP2, EP4 = (("--expert-model-parallel-size", size) for size in ("2", "4"))
TP2 = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--expert-tensor-parallel-size", "1"),
)
VPP2 = (
    *("--pipeline-model-parallel-size", "2"),
    *("--num-virtual-stages-per-pipeline-rank", "2"),
)
HETERO_TP = "model.image_encoder.tensor_model_parallel_size=1"
HETERO_DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
PACKING = "--packing"
ENCODER_FROZEN = "model.image_encoder.freeze=true"
NOTHING_BEFORE_LAYERS_TRAINS = (
    *(ENCODER_FROZEN, "model.image_projector.freeze=true"),
    *("--freeze-parameters", "*word_embeddings*"),
)
AHEAD = ("--overlap-grad-reduce", "--overlap-param-gather")
BALANCED = (
    *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2", "1e-2", "--moe-z-loss-coeff", "1e-3"),
)
# Ranks and flags: every layout in every mode, and what may go wrong with nodes spread over them.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep2": (2, (*EP2, *BALANCED)),
    "tp2-hetero-tp": (2, (*EP2, *TP2, HETERO_TP, PACKING)),
    "tp2-hetero-dp": (2, (*EP2, *TP2, HETERO_DP, *AHEAD)),
    "vpp2": (4, (*EP2, *VPP2, *AHEAD)),
    "tp2-vpp2-hetero-tp": (4, (*EP2, *TP2, *VPP2, HETERO_TP, *NOTHING_BEFORE_LAYERS_TRAINS)),
    "tp2-vpp2-hetero-dp": (4, (*EP2, *TP2, *VPP2, HETERO_DP)),
    "tp2-vpp2-full": (4, (*EP2, *TP2, *VPP2, FULL, *AHEAD, "--full-hetero-dp-cpu-offload")),
    "ep4-tp2-full": (4, (*EP4, *TP2, FULL, ENCODER_FROZEN, *AHEAD, EARLY)),
}
STEPS, SAMPLES, LAYERS = 3, 8, 4


class Numbers:
    """Watches a run: every microbatch's loss, every step's norm, at its end the parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.images: list[bool] = []
        self.chunks: Any = ()

    def built(self, chunks: Any, optimizer: Any, **_: Any) -> None:
        self.chunks = chunks

    def loss(self, microbatch: Microbatch, report: LossReport) -> None:
        self.losses.append(float(report[0]))
        self.images.append(microbatch.patches > 0)

    def parameters(self) -> dict[str, str]:
        return {
            f"{number}.{name}": hashlib.sha256(bytes_of(parameter)).hexdigest()
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }


def bytes_of(parameter: Tensor) -> bytes:
    return parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained(rank: int, *, flags: list[str]) -> dict[str, Any]:
    """This rank's numbers, and how often which node ran."""
    numbers, nodes = Numbers(), Counter()
    step, forward = ChainedOptimizer.step, ScheduleNode._forward

    def noted(self: Any) -> Any:
        result = step(self)
        numbers.norms.append(result[1])
        return result

    def counted(self: Any, *inputs: Any) -> Any:
        nodes[self.name] += 1
        return forward(self, *inputs)

    ChainedOptimizer.step, ScheduleNode._forward = noted, counted
    run(flags, watch=numbers)
    return {
        "numbers": (numbers.losses, numbers.norms, numbers.parameters()),
        "images": numbers.images,
        "nodes": nodes,
    }


@pytest.fixture(scope="module")
def flags(flags, demo):
    evaluation = ("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1")
    return [
        *flags,
        *("--model-name", "qwen3_vl_moe_tiny", "--bf16", "--use-distributed-optimizer"),
        *("--micro-batch-size", "1", "--global-batch-size", str(SAMPLES)),
        *("--train-iters", str(STEPS), *evaluation, "--eval-interval", "2"),
    ]


@pytest.mark.parametrize("name", CASES)
def test_overlap_changes_no_bit(flags, name):
    ranks, layout = CASES[name]
    without = [flag for flag in (*flags, *layout) if flag != EARLY]
    plain = run_ranks(trained, ranks, flags=without, timeout=290.0)
    found = run_ranks(trained, ranks, flags=[*flags, *layout, OVERLAP], timeout=290.0)
    tp, stages = (2 if each[0] in layout else 1 for each in (TP2, VPP2))
    passes = STEPS * LAYERS // stages * SAMPLES // (ranks // tp // stages)
    for rank, (one, other) in enumerate(zip(plain, found, strict=True)):
        assert other["numbers"] == one["numbers"], rank
        assert one["nodes"] == {}
        for node in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"):
            assert other["nodes"][node] == passes
    images = [image for rank in found for image in rank["images"]]
    assert any(images)
    assert PACKING in layout or not all(images)  # text-only ones among the others
