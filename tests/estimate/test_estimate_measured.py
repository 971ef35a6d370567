"""The estimate against real runs on CPU ranks, whose live tensors are counted."""

import pytest
from measured import measure
from ranks import run_ranks

from loongplug.estimate.command import _parsed
from loongplug.estimate.estimate import GRADIENTS, OPTIMIZER, WEIGHTS, estimate
from loongplug.estimate.units import units_of_data

DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SHARDED = "--use-distributed-optimizer"
CASES = {
    "uniform": (1, ()),
    "pp2": (2, (PP, "2")),
    "full-pp2": (2, (FULL, PP, "2")),
    "dp-tp2": (2, (DP, TP, "2")),
    "moe-ep2": (2, ("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2", SHARDED)),
    "full-tp2-pp2-sp": (4, (FULL, TP, "2", PP, "2", "--sequence-parallel", SHARDED)),
    "vpp": (2, (PP, "2", "--num-virtual-stages-per-pipeline-rank", "2", "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1","model.image_encoder.recompute=true")),
    "frozen": (2, (DP, TP, "2", SHARDED, "+model.image_encoder.freeze=True")),
    "bf16": (2, (FULL, SHARDED, "--bf16")),
}


def estimated(rank, *, flags, ranks):
    import torch.distributed as dist

    dist.destroy_process_group()
    parsed = _parsed(flags, ranks=ranks)
    return estimate(parsed, units_of_data(parsed.args, parsed.model, step=1))


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_was_estimated(flags, name):
    ranks, more = CASES[name]
    run = [*flags, *more, "--train-iters", "2"]
    apart = DP in more or FULL in more
    (expected,) = run_ranks(estimated, 1, flags=run, ranks=ranks)
    found = run_ranks(measure, ranks, flags=run, apart=apart, timeout=120.0)
    for stage in expected:
        real = found[stage.rank]
        print(name, stage.stage, stage.when)
        for part in sorted({*real.state, *real.most, *stage.most}):
            print(f"  {part:22} {stage.most.get(part,0):10} {real.state.get(part, real.most.get(part,0)):10}")
        print(f"  {'total':22} {stage.total:10} {real.total:10}  {stage.total/real.total:.3f}", stage.parts)
