"""Cases of the rule in rules/communicators.py."""

from rule_cases.kinds import Cases
from rule_cases.streaming import AUTO, SEPARATED, STREAMED

DEEP = {"world_size": 13, "global_batch_size": 26, "num_layers": 13}
DEEP = {**DEEP, "pipeline_model_parallel_size": 13, "target_device": "cuda"}

CASES: Cases = {
    "communicators": (
        [{**STREAMED, **DEEP}],
        [
            *({**each, **DEEP} for each in (SEPARATED, AUTO)),
            {**STREAMED, **DEEP, "target_device": "cpu"},
        ],
    )
}
