"""Frozen modules and parameters in every mode against the single rank, tensor by tensor.

What is frozen must not move, and everything else has the gradients, the weights and the optimizer
state of the single rank's run with the same freeze.
"""

import pytest
from sweeps import sweep
from verify_cases import made_plan

from loongplug.verify.compare import compare
from loongplug.verify.recording import read_recording
from loongplug.verify.runs import record

pytestmark = pytest.mark.slow

TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP = ("--pipeline-model-parallel-size", "2")
VPP = ("--num-virtual-stages-per-pipeline-rank", "2")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
)
ENCODER, PROJECTOR, DECODER = (
    f"model.{module}.freeze=true" for module in ("image_encoder", "image_projector", "foundation")
)
FREEZE, TRAIN = "--freeze-parameters", "--train-parameters"
TIED = "model.foundation.tie_word_embeddings=true"

LAYOUTS = {
    "uniform-vpp": (2, (*PP, *VPP, *RECOMPUTE, "--overlap-grad-reduce")),
    "hetero-tp": (2, (*TP, "model.image_encoder.tensor_model_parallel_size=1", *OVERLAP)),
    "hetero-dp": (2, (*TP, "--enable-encoder-hetero-dp", *OVERLAP, *RECOMPUTE)),
    "full-vpp": (2, (*PP, *VPP, "--enable-full-hetero-dp", *OVERLAP)),
}
EVERY_MODE = tuple(LAYOUTS)

# Of one model: 4 decoder layers, 3 in the encoder.
FROZEN = {
    "encoder": ((ENCODER,), EVERY_MODE),
    "vision": ((ENCODER, PROJECTOR), EVERY_MODE),
    "decoder": ((DECODER,), EVERY_MODE),
    "only-projector": ((ENCODER, DECODER), ("hetero-tp", "full-vpp")),
    "only-first-layer": (
        (FREEZE, "*", TRAIN, "text_decoder.decoder.layers.0.*"),
        ("uniform-vpp", "hetero-dp"),
    ),
    "weights": ((FREEZE, "*.weight"), ("hetero-tp", "full-vpp")),
    "mixed": (
        (
            *(TIED, FREEZE, "*.layers.[12].*", "*word_embeddings*", "*patch_embed*"),
            *("image_projector.deepstack.0.*", "*qkv.weight"),
        ),
        ("uniform-vpp", "hetero-dp", "full-vpp"),
    ),
}
EXPERTS = ("--model-name", "qwen3_vl_moe_tiny", "--moe-aux-loss-coeff", "0.1")
EXPERTS_FROZEN = {
    "decoder": (DECODER,),
    "experts": (FREEZE, "*.experts.*", "*.1.mlp.router.*"),
    "only-some-experts": (FREEZE, "*", TRAIN, "*.local_experts.[3-6].*"),
}


def agrees(folder, frozen, layouts):
    plan = made_plan(folder, *PP, *VPP, *TP, *frozen)  # for four layers, and sizes of TP 2
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


@pytest.mark.parametrize("frozen", sweep(FROZEN, but=("encoder",)))
def test_every_mode_trains_what_the_single_rank_trains(tmp_path, frozen):
    flags, modes = FROZEN[frozen]
    agrees(tmp_path, flags, {mode: LAYOUTS[mode] for mode in modes})


@pytest.mark.parametrize("frozen", sweep(EXPERTS_FROZEN, but=("experts",)))
def test_experts_and_routers(tmp_path, frozen):
    layout = (*TP, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
    agrees(tmp_path, (*EXPERTS, *EXPERTS_FROZEN[frozen]), {"ep": (2, (*layout, *OVERLAP))})
