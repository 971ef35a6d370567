"""Cases of the rules in rules/hyperparameters.py."""

import math

from rule_cases.kinds import LAYOUT, TP, Cases

_GROWS = {"rampup_batch_size": [4, 2, 20]}  # to 8
_SCHEDULE = {"global_batch_size": None, "step_batch_size_schedule": "0:4 1280:8"}
_FEWER = {"decrease_batch_size_if_needed": True}

CASES: Cases = {
    "numbers": (
        [
            {"seq_length": 0},
            {"train_iters": None, "epochs": 0},
            {"tensor_model_parallel_size": -1},
            {"pipeline_model_parallel_size": 0, "context_parallel_size": 0},
            {"clip_grad": -1.0},
            {"lr": math.inf},
            {"video_fps": math.nan},
            {"adam_beta1": 1.0},
            {"adam_beta2": -0.1},
            {"seed": 0},
            {"seed": 2**31},
        ],
        [
            {"loss_scale": 2.0},
            {"seq_length": 1},
            {"ckpt_step": 1},
            {"weight_decay": 0.0},
            {"lr": 0.0},
            {"adam_beta1": 0.0, "seed": 2**31 - 1},
        ],
    ),
    "required-flags": (
        [
            {name: None}
            for name in ("training_phase", "seq_length", "micro_batch_size", "lr", "train_iters")
        ],
        [{"global_batch_size": None}, {"train_iters": None, "epochs": 2}],
    ),
    "run-length": ([{"epochs": 2}], [{"train_iters": None, "epochs": 2}]),
    "warm-up": (
        [
            {"train_iters": 10, "lr_warmup_iters": 10},
            {"train_iters": 99, "lr_decay_iters": 10, "lr_warmup_iters": 10},
        ],
        [{"train_iters": 10, "lr_warmup_iters": 9}],
    ),
    "batch-ramp": (
        [
            {**_GROWS, "global_batch_size": None},
            {**_GROWS, "global_batch_size": 7},
            {"rampup_batch_size": [4, 0, 20]},
            {"rampup_batch_size": [0, 2, 20]},
            {"rampup_batch_size": [4, 2, -1]},
            {"rampup_batch_size": ["4", "few", "20"]},
            {**_GROWS, **_SCHEDULE},
            {**_GROWS, **_FEWER},
            {**_SCHEDULE, **_FEWER},
            {**_SCHEDULE, "global_batch_size": 8},
            {**_SCHEDULE, "step_batch_size_schedule": "0:8 1280:4"},
        ],
        [_GROWS, _SCHEDULE],
    ),
    "global-batch": (
        [
            {"global_batch_size": 7},
            {**LAYOUT, "global_batch_size": 8},
            {"rampup_batch_size": [4, 1, 20]},
            {**_SCHEDULE, "step_batch_size_schedule": "0:4 1280:9"},
            {"world_size": 4, "global_batch_size": 2, **_FEWER},
        ],
        [{**TP, "global_batch_size": 8}, {"global_batch_size": 7, **_FEWER}],
    ),
}
