"""Cases of the rules in rules/batch.py."""

from rule_cases.kinds import LAYOUT, TP, Cases

_GROWS = {"rampup_batch_size": [4, 2, 20]}  # to 8
_SCHEDULE = {"global_batch_size": None, "step_batch_size_schedule": "0:4 1280:8"}
_FEWER = {"decrease_batch_size_if_needed": True}

CASES: Cases = {
    "batch-ramp": (
        [
            {**_GROWS, "global_batch_size": None},
            {**_GROWS, "global_batch_size": 7},
            {**_GROWS, "global_batch_size": 2},
            {"rampup_batch_size": [4, 0, 20]},
            {"rampup_batch_size": [0, 2, 20]},
            {"rampup_batch_size": [4, 2, -1]},
            {"rampup_batch_size": ["4", "few", "20"]},
            {**_GROWS, **_SCHEDULE},
            {**_GROWS, **_FEWER},
            {**_SCHEDULE, **_FEWER},
            {**_SCHEDULE, "global_batch_size": 8},
            {**_SCHEDULE, "step_batch_size_schedule": "4 1280:8"},
            {**_SCHEDULE, "step_batch_size_schedule": "64:4 1280:8"},
            {**_SCHEDULE, "step_batch_size_schedule": "0:8 1280:4"},
            {**_SCHEDULE, "step_batch_size_schedule": "0:4 1280:8 1281:10"},  # of one sample
        ],
        [_GROWS, _SCHEDULE, {"rampup_batch_size": [8, 2, 20]}],
    ),
    "global-batch": (
        [
            {"global_batch_size": 7},
            {**LAYOUT, "global_batch_size": 8},
            {**TP, "micro_batch_size": 3},
            {"rampup_batch_size": [4, 1, 20]},
            {**LAYOUT, **_GROWS, "global_batch_size": 16, "rampup_batch_size": [8, 8, 20]},
            {**_SCHEDULE, "step_batch_size_schedule": "0:4 1280:9"},
        ],
        [
            LAYOUT,
            {**TP, "global_batch_size": 8},
            {"global_batch_size": None},
            {"global_batch_size": 7, **_FEWER},
        ],
    ),
    "eval-batch": (
        [
            {"eval_global_batch_size": 7},
            {"eval_micro_batch_size": 3},
            {"eval_global_batch_size": 8, "eval_micro_batch_size": 3},
            {"eval_micro_batch_size": 9, **_FEWER},
        ],
        [
            {"eval_global_batch_size": 6},
            {"eval_global_batch_size": 9, "eval_micro_batch_size": 3},
            {"eval_micro_batch_size": 3, **_FEWER},
            {**_GROWS, "eval_global_batch_size": 2},
        ],
    ),
}
