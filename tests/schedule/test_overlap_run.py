"""Whole runs with experts' exchange overlapped: not a bit differs from those without."""

import pytest
from parity.bits import bits_of, first_difference
from sweeps import sweep

pytestmark = pytest.mark.slow

OVERLAP = "--overlap-moe-expert-parallel-comm"
# These say how to overlap.
EARLY, DELAYED = "--ep-overlap-early-attn-memory-release", "--delay-wgrad-compute"
EP2, EP4 = (("--expert-model-parallel-size", size) for size in ("2", "4"))
TP2 = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--expert-tensor-parallel-size", "1"),
)
ETP2 = ("--expert-tensor-parallel-size", "2")  # behind TP2, whose 1 gives way
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
# What leaves for the host: without it, too, not a bit differs.
FEATURES_AWAY, STATE_AWAY = "--full-hetero-dp-cpu-offload", "--offload-encoder-state"
SHARED = "model.foundation.shared_expert_ffn_hidden_size=48"
AHEAD = ("--overlap-grad-reduce", "--overlap-param-gather")
BALANCED = (
    *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2", "1e-2", "--moe-z-loss-coeff", "1e-3"),
)
# Ranks and flags: every layout in every mode, and what may go wrong with nodes spread over them.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep2": (2, (*EP2, *BALANCED)),
    "tp2-hetero-tp": (2, (*EP2, *TP2, HETERO_TP, PACKING)),
    "tp2-hetero-dp": (2, (*EP2, *TP2, HETERO_DP, *AHEAD, DELAYED)),
    "etp2": (4, (*EP2, *TP2, *ETP2, "--moe-router-dtype", "fp32", *BALANCED, SHARED, DELAYED)),
    "vpp2": (4, (*EP2, *VPP2, *AHEAD, SHARED)),
    "tp2-vpp2-hetero-tp": (4, (*EP2, *TP2, *VPP2, HETERO_TP, *NOTHING_BEFORE_LAYERS_TRAINS)),
    "tp2-vpp2-hetero-dp": (4, (*EP2, *TP2, *VPP2, HETERO_DP)),
    "tp2-vpp2-full": (
        4,
        (*EP2, *TP2, *VPP2, FULL, *AHEAD, FEATURES_AWAY, STATE_AWAY, DELAYED),
    ),
    "ep4-tp2-full": (4, (*EP4, *TP2, FULL, ENCODER_FROZEN, *AHEAD, EARLY)),
}
STEPS, SAMPLES, LAYERS = 3, 8, 4


@pytest.fixture(scope="module")
def flags(flags, demo):
    evaluation = ("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1")
    return [
        *flags,
        *("--model-name", "qwen3_vl_moe_tiny", "--bf16", "--use-distributed-optimizer"),
        *("--micro-batch-size", "1", "--global-batch-size", str(SAMPLES)),
        *("--train-iters", str(STEPS), *evaluation, "--eval-interval", "2"),
    ]


# Both heterogeneous ways, virtual stages, and all that says how to overlap.
FEW = ("tp2-vpp2-full",)


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_overlap_changes_no_bit(flags, name, tmp_path):
    ranks, layout = CASES[name]
    more = (EARLY, DELAYED, FEATURES_AWAY, STATE_AWAY)
    without = [flag for flag in (*flags, *layout) if flag not in more]
    without += ("--full-hetero-dp-schedule", "separated")  # as with the overlap
    plain = bits_of(without, ranks=ranks, folder=tmp_path / "plain", timeout=290.0)
    found = bits_of(
        [*flags, *layout, OVERLAP], ranks=ranks, folder=tmp_path / "overlapped", timeout=290.0
    )
    assert first_difference(found, plain) == ""
    tp, stages = (2 if each[0] in layout else 1 for each in (TP2, VPP2))
    passes = STEPS * LAYERS // stages * SAMPLES // (ranks // tp // stages)
    for one, other in zip(plain, found, strict=True):
        assert one.nodes == {}
        assert len(one.norms) == STEPS
        assert one.gradients[0]
        assert one.parameters
        for node in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"):
            assert other.nodes[node] == passes
    images = [image for rank in found for image in rank.images]
    assert any(images)
    assert PACKING in layout or not all(images)  # text-only ones among the others
