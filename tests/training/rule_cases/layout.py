"""Cases of the rules in rules/layout.py."""

from rule_cases.kinds import PP, TP, Cases, model

_EVALUATED = {"valid_data_path": [__file__], "eval_global_batch_size": 8}
_SHARED = {**TP, "sequence_parallel": True}

CASES: Cases = {
    "world-size": (
        [{**TP, "world_size": 7}, {**PP, "world_size": 3}],
        [TP, {**TP, **PP}, {**TP, "world_size": 6, "global_batch_size": 12}],
    ),
    "virtual-microbatches": (
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": None},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "rampup_batch_size": [8, 8, 9]},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, **_EVALUATED},
        ],
        [
            {**PP, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2},
            {**PP, **_EVALUATED},
            # 5 microbatches in groups of 3 and 2.
            {
                **PP,
                "num_virtual_stages_per_pipeline_rank": 2,
                "global_batch_size": 40,
                "microbatch_group_size_per_vp_stage": 3,
            },
        ],
    ),
    "tensor-parallel-sizes": (
        [
            model(tp=4),  # key and value heads
            model("foundation.num_attention_heads=5", "foundation.num_query_groups=1", tp=2),
            model("foundation.ffn_hidden_size=383", tp=2),
            model("foundation.vocab_size=129", tp=2),
        ],
        [
            model("foundation.num_query_groups=4", tp=4),
            model("foundation.num_attention_heads=6", tp=2),
            model("foundation.ffn_hidden_size=383"),
            model("foundation.vocab_size=130", tp=2),
        ],
    ),
}

WITH_EXPERTS: Cases = {
    "tensor-parallel-sizes": (
        [{**_SHARED, "moe_shared_expert_intermediate_size": 97}],
        [
            {**_SHARED, "moe_shared_expert_intermediate_size": 98},
            {**_SHARED, "ffn_hidden_size": 97},  # no layer has it
            {"expert_model_parallel_size": 4, "moe_shared_expert_intermediate_size": 97},
        ],
    ),
}
