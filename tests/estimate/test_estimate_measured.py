"""The estimate against real runs on CPU ranks, whose live tensors are counted."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from digits.sounds import make_sound_data
from free_passes import free_passes
from measured import measure
from ranks import run_ranks
from sweeps import sweep

from loongplug.estimate.estimate import ROLES, estimate
from loongplug.estimate.live_bytes import (
    DECODER,
    ENCODER,
    FEATURE_GRADIENTS,
    FEATURES,
    GRADIENTS,
    INPUT,
    OPTIMIZER,
    PIPELINE,
    STATE_GRADIENTS,
    STATES,
    WEIGHTS,
)
from loongplug.estimate.run_of_flags import parsed_for, step_of_data

pytestmark = pytest.mark.slow

DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
CP, LONG = "--context-parallel-size", ("--seq-length", "128")
EP, EXPERTS = "--expert-model-parallel-size", ("--model-name", "qwen3_vl_moe_tiny")
# Every token goes to all ranks, and experts get about equally many, which the estimate supposes.
ALLGATHER = ("--moe-token-dispatcher-type", "allgather", "--moe-router-force-load-balancing")
PACKED = ("--packing", "--micro-batch-size", "1", "--seq-length", "160")
ONE_UNIT = ("--micro-batch-size", "8")
VPP = ("--num-virtual-stages-per-pipeline-rank", "2")
SHARDED = "--use-distributed-optimizer"
RECOMPUTE = (
    *("model.image_encoder.recompute=true", "--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
LORA = ("+model.foundation.lora.rank=8",)
LORA_ONLY = ("+model.image_encoder.lora.rank=4", "model.image_projector.freeze=true")
OFFLOAD = (
    "--full-hetero-dp-cpu-offload",
    *("--offload-encoder-activations", "--offload-encoder-state"),
)
STREAMED = (FULL, "--full-hetero-dp-schedule", "streamed")
MANY = ("--micro-batch-size", "1", "--global-batch-size", "12")
PAIRS = "--overlap-moe-expert-parallel-comm"
OVERLAP = (
    *(*EXPERTS, EP, "2", "--bf16", SHARDED, PAIRS),
    *("--micro-batch-size", "1", "--moe-router-force-load-balancing"),
)
DELAYED = "--delay-wgrad-compute"
TWICE = (
    *("--recompute-granularity", "selective", "--recompute-modules"),
    *("a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp"),
)
NAMED = "--offload-tensors"
AWAY = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1024"),
    *(NAMED, "dispatched_input", "pre_mlp_layernorm_input"),
)
DENSE_AWAY = (*AWAY[:3], NAMED, "layer_input", "qkv", "fc1_output", "fc2_input")
BF16_GRADIENTS = "--grad-reduce-in-bf16"
FROZEN = "+model.image_encoder.freeze=True"
# What encoders keep on the host for grids that they have met counts as theirs on the CPU.
HOST_TABLES = 30_000
STEP_COUNTERS = 256  # Adam has one of 4 bytes for each tensor
COLUMNS = {
    "weights, gradients, optimizer state": (WEIGHTS, GRADIENTS, OPTIMIZER),
    "encoder activations": (ENCODER,),
    "decoder activations": (DECODER,),
    "features, states between stages": (FEATURES, STATES),
    "all, at the fullest": ("total",),
    "all, in the optimizer's step": ("step",),
}
# Ranks and flags.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "uniform-pp2-offload": (2, (PP, "2", *DENSE_AWAY)),
    "uniform-pp2-vpp2-recompute": (2, (PP, "2", *VPP, *RECOMPUTE, "--bf16")),
    "uniform-experts": (2, (*EXPERTS, EP, "2", SHARDED)),
    "uniform-cp2-tp2-sp": (4, (CP, "2", TP, "2", SP, SHARDED, *LONG)),
    "uniform-cp3-recompute": (3, (CP, "3", *RECOMPUTE, "--seq-length", "96")),
    "uniform-cp2-pp2-packed": (4, (CP, "2", PP, "2", *PACKED, "--cp-balance", "lpt")),
    "hetero-dp-tp2-frozen": (2, (DP, TP, "2", SHARDED, FROZEN)),
    "hetero-dp-tp2-sp": (2, (DP, TP, "2", SP)),
    "full-tp2-pp2-sp": (4, (FULL, TP, "2", PP, "2", SP, SHARDED)),
    # One unit, whose images all replicas share.
    "hetero-dp-tp2-shared": (2, (DP, TP, "2", *ONE_UNIT)),
    "full-tp2-pp2-sp-shared": (4, (FULL, TP, "2", PP, "2", SP, SHARDED, *ONE_UNIT)),
    "full-pp2-shared-offload": (2, (FULL, PP, "2", *ONE_UNIT, *OFFLOAD)),
    "full-cp2": (2, (FULL, CP, "2", SHARDED)),
    "full-bf16": (2, (FULL, SHARDED, "--bf16", BF16_GRADIENTS)),
    "full-pp2-decoder-lora-offload": (2, (FULL, PP, "2", SHARDED, *LORA, *OFFLOAD)),
    "full-pp2-lora-only": (2, (FULL, PP, "2", *LORA, *LORA_ONLY, *RECOMPUTE, *OFFLOAD[1:])),
    "experts-allgather-lora-packed": (2, (*EXPERTS, *ALLGATHER, EP, "2", *LORA, *PACKED)),
    "streamed-pp2": (2, (*STREAMED, PP, "2", SHARDED, *MANY)),
    "streamed-tp2-pp2-sp": (4, (*STREAMED, TP, "2", PP, "2", SP, *MANY)),
    "streamed-pp2-many-passes": (2, (*STREAMED, PP, "2", *MANY)),
    "streamed-pp2-many-passes-away": (2, (*STREAMED, PP, "2", OFFLOAD[1], *MANY)),
    # Packs: replicas that share experts have rows of one length there.
    "overlap-delayed-saved": (2, (*OVERLAP, DELAYED, *TWICE, *AWAY, *PACKED)),
    "overlap-full-vpp2-delayed": (
        4,
        (*OVERLAP, PP, "2", *VPP, FULL, DELAYED, "--global-batch-size", "16"),
    ),
    "overlap-full-vpp2-saved": (4, (*OVERLAP, PP, "2", *VPP, FULL, *TWICE, *AWAY)),
}

TWO_ENCODERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "two-encoders-dp2": (2, (SHARDED,)),
    "two-encoders-one-own-rank": (2, ("model.audio_encoder.rank_offset=1", SHARDED)),
    "two-encoders-audio-stages": (
        3,
        (
            *("model.audio_encoder.rank_offset=1", SHARDED),
            "model.audio_encoder.pipeline_model_parallel_size=2",
        ),
    ),
    "two-encoders-full-tp2-pp2": (4, (FULL, TP, "2", PP, "2", SHARDED, *OFFLOAD)),
    "two-encoders-streamed-tp2-pp2-many-passes": (4, (*STREAMED, TP, "2", PP, "2", SHARDED)),
    "two-encoders-full-and-uniform-pp2": (
        2,
        (FULL, PP, "2", "model.audio_encoder.mode=uniform", "+model.audio_encoder.freeze=true"),
    ),
}


# The last ranks have the encoder alone.
OWN = "model.image_encoder.rank_offset"
OWN_RANKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "own-rank": (2, (f"{OWN}=1", SHARDED)),
    "own-rank-dp2-frozen": (3, (f"{OWN}=2", FROZEN, "--global-batch-size", "16")),
    "own-rank-pp2-recompute": (3, (f"{OWN}=2", PP, "2", *RECOMPUTE)),
    "own-ranks-dp2": (3, (f"{OWN}=1", "model.image_encoder.data_parallel_size=2", SHARDED)),
    "own-rank-tp2-sp-all-frozen": (
        3,
        (f"{OWN}=2", TP, "2", SP, FROZEN, "model.image_projector.freeze=true"),
    ),
    "own-ranks-tp2-lora-only": (
        3,
        (f"{OWN}=1", "model.image_encoder.tensor_model_parallel_size=2", *LORA, *LORA_ONLY),
    ),
}
# Behind the decoder's ranks, those of each of the encoder's stages.
STAGES = "model.image_encoder.pipeline_model_parallel_size=2"
ENCODER_STAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "own-stages": (3, (f"{OWN}=1", STAGES, "--global-batch-size", "16")),
    "own-stages-frozen": (
        3,
        (f"{OWN}=1", STAGES, FROZEN, "--global-batch-size", "16"),
    ),
    "own-stages-dp2-recompute": (
        4,
        (f"{OWN}=2", STAGES, *RECOMPUTE, "--global-batch-size", "24"),
    ),
}


def estimated(rank, *, flags, ranks, freely):
    if freely:
        free_passes(rank)
    dist.destroy_process_group()  # the harness's: the estimate makes one of its own
    parsed = parsed_for([*flags, "--device", "cpu"], ranks=ranks)
    # The step that is measured, the first, has made the optimizer's state.
    return estimate(parsed, step_of_data(parsed.args, parsed.model, step=1))


@pytest.fixture(scope="module")
def table():
    """Rows for the table of docs/memory.md, which goes to the file that MEMORY_TABLE names."""
    rows = []
    yield rows
    if "MEMORY_TABLE" in os.environ:
        head = ["| " + " | ".join(("run", "stage", *COLUMNS)) + " |"]
        head.append("| --- | --- |" + " ---: |" * len(COLUMNS))
        Path(os.environ["MEMORY_TABLE"]).write_text("\n".join([*head, *rows, ""]))


def row(name, stage, real):
    """Estimated and measured, in MB."""
    found = {**stage.most, "total": stage.total, "step": stage.step}
    found[DECODER] = found.get(DECODER, 0) + found.get(PIPELINE, 0)
    seen = {**real.most, **real.state, "total": real.total, "step": real.step}
    cells = (
        " / ".join(
            f"{sum(each.get(part, 0) for part in parts) / 1e6:.2f}" for each in (found, seen)
        )
        for parts in COLUMNS.values()
    )
    return f"| {name} | {stage.place.removeprefix('stage ')} | " + " | ".join(cells) + " |"


FEW = [
    "uniform-pp2-offload",
    "uniform-experts",
    "uniform-cp2-tp2-sp",
    "hetero-dp-tp2-sp",
    "full-tp2-pp2-sp-shared",
    "full-bf16",
    "full-pp2-lora-only",
    "streamed-tp2-pp2-sp",
    "streamed-pp2-many-passes-away",
    "overlap-full-vpp2-delayed",
]


@pytest.mark.parametrize("name", sweep(CASES, but=FEW))
def test_a_step_holds_what_was_estimated(flags, name, table):
    holds_what_was_estimated(flags, name, table)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Flags of a model that sees and hears, on rows with scans and spoken digits."""
    folder = tmp_path_factory.mktemp("sounds")
    make_sound_data(folder, train=32, test=1)
    return (
        *("--model-name", "qwen2_5_omni_tiny", "--seq-length", "320"),
        *("--tokenizer-model", str(folder / "processor_qwen2_5_omni")),
        *("--train-data-path", str(folder / "train_both.jsonl")),
    )


@pytest.mark.parametrize("name", TWO_ENCODERS)
def test_a_step_of_two_encoders_holds_what_was_estimated(flags, sounds, name, table):
    holds_what_was_estimated([*flags, *sounds], name, table)


@pytest.mark.parametrize("name", OWN_RANKS)
def test_a_step_with_the_encoder_on_ranks_of_its_own_holds_what_was_estimated(flags, name, table):
    stages = holds_what_was_estimated(flags, name, table)
    *decoder, encoder = stages
    assert all(ENCODER not in each.most and INPUT not in each.most for each in decoder)
    assert DECODER not in encoder.most
    assert (FEATURE_GRADIENTS in encoder.most) != name.endswith("all-frozen")


@pytest.mark.parametrize("name", ENCODER_STAGES)
def test_a_step_of_an_encoder_s_stages_holds_what_was_estimated(flags, name, table):
    _, first, last = holds_what_was_estimated(flags, name, table)
    assert (INPUT in first.most, INPUT in last.most) == (True, False)
    assert (FEATURES in first.most, FEATURES in last.most) == (False, True)
    assert STATES in first.most
    assert STATES in last.most
    goes_back = not name.endswith("frozen")  # to the first stage, which has no projector
    assert (STATE_GRADIENTS in first.most) == (STATE_GRADIENTS in last.most) == goes_back


def on_its_way(stage, real):
    """What an encoder's rank sends and is sent.

    Where gradients come back, a send may be done earlier than is known for certain; where none do,
    what gloo holds is what a slow receiver has any backend hold.
    """
    for part, back in ((FEATURES, FEATURE_GRADIENTS), (STATES, STATE_GRADIENTS)):
        assert real.get(part, 0) <= stage.most.get(part, 0), (stage, real, part)
        if back not in stage.most:
            assert stage.most.get(part, 0) == pytest.approx(real.get(part, 0), rel=0.1)
    assert real.get(STATE_GRADIENTS, 0) <= stage.most.get(STATE_GRADIENTS, 0)


def holds_what_was_estimated(flags, name, table):
    ranks, more = (CASES | TWO_ENCODERS | OWN_RANKS | ENCODER_STAGES)[name]
    run = [*flags, *more, "--train-iters", "2"]
    freely = "many-passes" in name
    (stages,) = run_ranks(estimated, 1, flags=run, ranks=ranks, freely=freely)
    apart = DP in more or FULL in more or any("rank_offset" in each for each in more)
    found = run_ranks(measure, ranks, flags=run, apart=apart, freely=freely, timeout=180.0)
    for stage in stages:
        real, most = found[stage.rank], dict(stage.most)
        table.append(row(name, stage, real))
        for part in (WEIGHTS, GRADIENTS, OPTIMIZER):
            assert most.get(part, 0) == pytest.approx(
                real.state[part], rel=1e-3, abs=STEP_COUNTERS
            ), (stage, part)
        # What stages send each other is among what the real decoder's passes made.
        most[DECODER] = most.get(DECODER, 0) + most.pop(PIPELINE, 0)
        for part in (ENCODER, DECODER, INPUT):
            assert most.get(part, 0) == pytest.approx(
                real.most.get(part, 0), rel=0.1, abs=HOST_TABLES
            ), (stage, real.most, part)
        if stage.role not in ROLES:
            on_its_way(stage, real.most)
        elif stage.stage == 0:  # later ones have features before the schedule only
            assert most.get(FEATURES, 0) == pytest.approx(real.most.get(FEATURES, 0), rel=0.1)
        # Looked at before each pass, when the last one's is not there yet.
        assert real.most.get(FEATURE_GRADIENTS, 0) <= most.get(FEATURE_GRADIENTS, 0)
        assert stage.total == pytest.approx(real.total, rel=0.1), (stage, real)
        assert stage.step == pytest.approx(real.step, rel=0.1), (stage, real)
        kept = sum(real.state.values())
        if BF16_GRADIENTS in more:  # of which all optimizers have copies
            assert stage.step - kept == pytest.approx(real.step - kept, rel=0.1)
        if {FULL, "--overlap-moe-expert-parallel-comm"} <= set(
            more
        ):  # a pair holds little beside the state
            assert stage.total - kept == pytest.approx(real.total - kept, rel=0.1)
        assert stage.host == pytest.approx(real.host if NAMED in more else 0, rel=0.1)
    return stages
