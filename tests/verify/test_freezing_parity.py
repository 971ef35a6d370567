"""Frozen modules and parameters in every mode against the single rank, tensor by tensor.

What is frozen must not move, and everything else has the gradients, the weights and the optimizer
state of the single rank's run with the same freeze.
"""

import pytest
from verify_cases import OVERLAPPED, RECOMPUTED, SP, VPP2, made_plan

from loongplug.verify.compare import compare
from loongplug.verify.forked_runs import record
from loongplug.verify.recorded_run import read_recording

pytestmark = pytest.mark.slow

LAYOUTS = {
    "uniform-vpp": (2, (*VPP2, *RECOMPUTED, "--overlap-grad-reduce")),
    "hetero-tp": (2, (*SP, "model.image_encoder.tensor_model_parallel_size=1", *OVERLAPPED)),
    "hetero-dp": (2, (*SP, "--enable-encoder-hetero-dp", *OVERLAPPED, *RECOMPUTED)),
    "full-vpp": (2, (*VPP2, "--enable-full-hetero-dp", *OVERLAPPED)),
}
EXPERTS = ("--model-name", "qwen3_vl_moe_tiny", "--moe-aux-loss-coeff", "0.1")
FROZEN_EXPERTS = ("--freeze-parameters", "*.experts.*", "*.1.mlp.router.*")


def agrees(folder, frozen, layouts):
    plan = made_plan(folder, *VPP2, *SP, *frozen)  # for four layers, and sizes of TP 2
    common = [
        flag
        for flag in plan.reference
        if not flag.startswith(("model.image_encoder.tensor", "model.image_encoder.recompute"))
    ]
    expected = read_recording(
        record(plan.reference, ranks=1, device="cpu", folder=folder / "reference")
    )
    for name, (ranks, layout) in layouts.items():
        found = record(
            (*common, *layout), ranks=ranks, device="cpu", folder=folder / name, timeout=120.0
        )
        comparison = compare(read_recording(found), expected)
        failing = [(each.what, each.name, each.error) for each in comparison.tensors if each.fails]
        assert comparison.agrees, (name, failing)


def test_every_mode_trains_what_the_single_rank_trains(tmp_path):
    """More of what can be frozen are cells of the parity matrix (tests/parity/parts.py)."""
    agrees(tmp_path, ("model.image_encoder.freeze=true",), LAYOUTS)


def test_experts_and_routers(tmp_path):
    layout = (*SP, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
    agrees(tmp_path, (*EXPERTS, *FROZEN_EXPERTS), {"ep": (2, (*layout, *OVERLAPPED))})
