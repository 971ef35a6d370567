"""Whole runs with heterogeneous TP and DP and full separation against the single rank.

Gradients, parameters and optimizer state of many more layouts are compared by the parity
harness; here are the losses and norms that a user sees, pair by pair of what may meet.
"""

from pathlib import Path

import pytest
from compared_runs import first_weights, same, train
from sweeps import sweep

pytestmark = pytest.mark.slow

DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP, SP = "--expert-model-parallel-size", "--sequence-parallel"
VPP = ("--num-virtual-stages-per-pipeline-rank", "2")
SHARDED = "--use-distributed-optimizer"
OVERLAP = (SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
REDUCES_AHEAD = "--overlap-grad-reduce"
RECOMPUTE = (
    *("model.image_encoder.recompute=true", "--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
ENCODER1, ENCODER2 = (f"model.image_encoder.tensor_model_parallel_size={n}" for n in (1, 2))
SINGLES, ALL_IN_ONE = ("--micro-batch-size", "1"), ("--micro-batch-size", "8")
# What changes the numbers; the single rank has it too.
MODELS: dict[str, tuple[str, ...]] = {
    "dense": ("model.foundation.num_query_groups=4",),  # for TP 4
    "experts": ("--model-name", "qwen3_vl_moe_tiny"),
}
# Ranks, flags and the model.
CASES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "tp2-encoder1": (2, (TP, "2", ENCODER1), "dense"),
    "tp2-pp2-vpp2-encoder1": (4, (TP, "2", PP, "2", *VPP, SHARDED, ENCODER1), "dense"),
    "tp4-encoder2-overlap": (4, (TP, "4", SP, ENCODER2, *OVERLAP), "dense"),
    "tp2-dp2-recompute": (4, (TP, "2", ENCODER1, *OVERLAP, *RECOMPUTE), "dense"),
    "dp-tp2-overlap": (2, (DP, TP, "2", *OVERLAP), "dense"),
    "dp-tp4-encoder2-sp": (4, (DP, TP, "4", ENCODER2, SP, *SINGLES), "dense"),
    "dp-tp2-pp2-recompute": (4, (DP, TP, "2", PP, "2", SHARDED, *RECOMPUTE), "dense"),
    "dp-tp2-pp2-vpp2-overlap": (4, (DP, TP, "2", PP, "2", *VPP, *OVERLAP), "dense"),
    "dp-tp2-dp2-reduces-ahead": (4, (DP, TP, "2", REDUCES_AHEAD), "dense"),
    "dp-tp4-more-replicas-than-units": (4, (DP, TP, "4", *ALL_IN_ONE, *OVERLAP), "dense"),
    "full-tp2-pp2-sp-overlap": (4, (FULL, TP, "2", PP, "2", SP, *OVERLAP), "dense"),
    "full-pp2-vpp2-recompute": (2, (FULL, PP, "2", *VPP, SHARDED, *RECOMPUTE), "dense"),
    "full-pp4-singles": (4, (FULL, PP, "4", *SINGLES, REDUCES_AHEAD), "dense"),
    "full-tp2-pp2-encoder2": (4, (FULL, TP, "2", PP, "2", ENCODER2, *OVERLAP), "dense"),
    "full-pp2-dp2": (4, (FULL, PP, "2", *OVERLAP), "dense"),
    "full-pp2-vpp2-encoder2": (2, (FULL, PP, "2", *VPP, ENCODER2, *OVERLAP), "dense"),
    "full-pp2-dp2-encoder2": (4, (FULL, PP, "2", ENCODER2, *OVERLAP), "dense"),
    "full-pp2-one-unit": (2, (FULL, PP, "2", *ALL_IN_ONE, *OVERLAP), "dense"),
    "full-dp2": (2, (FULL, *OVERLAP), "dense"),
    "dp-experts": (4, (DP, TP, "2", EP, "2", SP, SHARDED), "experts"),
    "full-experts": (4, (FULL, PP, "2", EP, "2", *OVERLAP), "experts"),
}


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """Flags that load a model's weights, and what the single rank makes of them, made once."""
    made = {}

    def of(model: str):
        if model not in made:
            kind = tuple(flag for flag in MODELS[model] if not flag.startswith("+"))
            weights = first_weights([*flags, *kind], tmp_path_factory.mktemp("weights") / "hf")
            run = [*flags, *MODELS[model], "--load-hf", weights, "--train-iters", "3"]
            made[model] = run, train(run)
        return made[model]

    return of


# What these find the others find (parity.faults); the parity matrix has them all.
FEW = (
    *("dp-tp4-encoder2-sp", "dp-tp4-more-replicas-than-units", "dp-experts"),
    *("full-tp2-pp2-sp-overlap", "full-pp2-dp2-encoder2", "tp2-pp2-vpp2-encoder1"),
)


@pytest.mark.parametrize(
    "name",
    sweep(CASES, but=FEW),
)
def test_losses_and_norms_are_those_of_one_rank(alone, name):
    ranks, layout, model = CASES[name]
    run, expected = alone(model)
    assert expected[-1][0] < 0.95 * expected[0][0]  # it learns, so a wrong update shows
    found = train(run, *layout, ranks=ranks)
    assert same(found, expected), (found, expected)


def test_an_encoder_sharded_over_stages_is_exported_whole(alone, tmp_path):
    run, _ = alone("dense")
    weights = Path(run[run.index("--load-hf") + 1])
    layout = (FULL, PP, "2", ENCODER2, "--lr", "0", "--train-iters", "1")
    train(run, *layout, "--save-hf", str(tmp_path / "hf"), ranks=4)
    name = "model.safetensors"
    assert (tmp_path / "hf" / name).read_bytes() == (weights / name).read_bytes()
