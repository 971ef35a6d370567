"""What is recomputed drops what its first forward has dropped, whoever draws for it."""

import pytest
from compared_runs import same, train
from layout_flags import TP2

pytestmark = pytest.mark.slow

SP = (*TP2, "--sequence-parallel")
RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
)
HIDDEN = ("--hidden-dropout", "0.5")  # drawn within the layer by whom the block has chosen
DROPOUT = {
    "attention": (*HIDDEN, "--attention-dropout", "0.5"),
    "adapters": (
        *HIDDEN,
        *("+model.foundation.lora.rank=4", "+model.foundation.lora.dropout=0.5"),
        *("+model.image_encoder.lora.rank=4", "+model.image_encoder.lora.dropout=0.5"),
    ),
    "experts' adapters": (
        *HIDDEN,
        *("--model-name", "qwen3_vl_moe_tiny", "--expert-tensor-parallel-size", "1"),
        *("+model.foundation.lora.rank=4", "+model.foundation.lora.dropout=0.5"),
        "+model.foundation.lora.target_modules=[linear_fc1,linear_fc2]",
    ),
}
CASES = [
    ("attention", SP),
    pytest.param("adapters", TP2, marks=pytest.mark.sweep),
    ("adapters", SP),
    ("experts' adapters", SP),
]


@pytest.mark.parametrize(("dropout", "layout"), CASES)
def test_recompute_changes_nothing(flags, dropout, layout):
    """Another draw would show in the gradient norm of the first step or the second."""
    given = [*flags, "--train-iters", "3", "--lr", "1e-2", *layout, *DROPOUT[dropout]]
    kept = train(given, ranks=2)
    assert same(train(given, *RECOMPUTE, ranks=2), kept)
