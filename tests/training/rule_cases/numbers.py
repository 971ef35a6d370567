"""Cases of the rules in rules/numbers.py."""

import math

from rule_cases.kinds import Cases

CASES: Cases = {
    "finite-numbers": (
        [
            {"lr": math.inf},
            {"lr": math.nan},
            {"min_lr": math.nan},
            {"weight_decay": math.nan},
            {"clip_grad": math.inf},
            {"loss_scale": math.nan},
            {"adam_eps": math.inf},
            {"video_fps": math.nan},
        ],
        [{"loss_scale": 2.0}],
    ),
    "optimizer-numbers": (
        [
            {"min_lr": -1e-3},
            {"decoupled_lr": -1e-3},
            {"weight_decay": -0.1},
            {"adam_beta1": -0.1},
            {"adam_beta2": 1.0},
            {"clip_grad": -1.0},
            {"lr_warmup_iters": -1},
            {"lr_warmup_fraction": -0.5},
            {"lr_warmup_init": -1e-4},
        ],
        [{"weight_decay": 0.0}, {"lr": 0.0}, {"adam_beta1": 0.0}, {"clip_grad": 0.0}],
    ),
    "seed": ([{"seed": -5}, {"seed": 0}, {"seed": 2**31}], [{"seed": 1}, {"seed": 2**31 - 1}]),
    "evaluation": (
        [{"eval_iters": 3}, {"eval_iters": -1}],
        [{"eval_iters": 3, "valid_data_path": [__file__]}, {"eval_iters": 3, "valid_share": 0.1}],
    ),
    "valid-share": (
        [{"valid_share": 0.1, "valid_data_path": [__file__]}],
        [{"valid_share": 0.1}, {"valid_data_path": [__file__]}],
    ),
    "eval-generate": (
        [
            {"eval_generate": 5},
            {"eval_generate": 0, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": -1, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": 5, "valid_data_path": [__file__]},
        ],
        [
            {"eval_generate": 5, "eval_iters": 3, "valid_data_path": [__file__]},
            {"eval_generate": 5, "eval_iters": None, "valid_data_path": [__file__]},
        ],
    ),
}
