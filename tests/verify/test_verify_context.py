"""Rows whose tokens lie on several ranks against a single rank, and what must not go unseen."""

from pathlib import Path

import pytest
from verify_cases import Pair, failing, made_plan

from loongplug.verify.report import report

CP2 = ("--context-parallel-size", "2")
CP3 = ("--context-parallel-size", "3")
TP2 = ("--tensor-model-parallel-size", "2")
SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
)
ADAPTED = ("+model.image_encoder.lora.rank=4", "+model.foundation.lora.rank=4")
EXPERTS = (
    *("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2"),
    *("--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.1"),
    "--moe-router-load-balancing-type",
)
ENCODER = "model.image_encoder"
SEES = {"image_encoder", "image_projector"}

# Ranks in all, and flags.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "cp3-mbs2": (3, (*CP3, "--micro-batch-size", "2")),
    "cp2-tp2-encoder-tp1": (4, (*CP2, *TP2, f"{ENCODER}.tensor_model_parallel_size=1")),
    "cp2-pp2-packed-p2p": (4, (*CP2, *PP2, "--packing", "--cp-comm-type", "p2p")),
    "cp2-dp2-overlapped-a2a": (4, (*CP2, *OVERLAPPED, "--cp-comm-type", "a2a")),
    "cp2-vpp2-recomputed": (4, (*CP2, *VPP2, *RECOMPUTED)),
    "cp2-adapted": (2, (*CP2, *ADAPTED)),
    "cp2-experts-packed": (2, (*CP2, *EXPERTS, "aux_loss", "--packing")),
    "cp2-tp2-experts": (4, (*CP2, *SP, *EXPERTS, "seq_aux_loss", "--micro-batch-size", "2")),
    "cp2-sees-and-hears": (2, (*CP2, "--model-name", "qwen2_5_omni_tiny")),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, demo: Path, tmp_path: Path) -> None:
    ranks, flags = CASES[name]
    plan = made_plan(tmp_path, demo, *flags, ranks=ranks, steps=1)
    comparison = Pair(plan, tmp_path).compared()
    print(report(plan, comparison))
    assert comparison.agrees, report(plan, comparison)
