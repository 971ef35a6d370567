"""Cases of the rules in rules/overlap.py."""

from rule_cases.kinds import Cases

OVERLAP = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
EP2 = {**OVERLAP, "expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}

CASES: Cases = {
    "moe-overlap": ([OVERLAP], []),
}

WITH_EXPERTS: Cases = {
    "moe-overlap": ([OVERLAP], [EP2]),
    "moe-overlap-stages": (
        [{**EP2, **PP2}],
        [
            {**EP2, **PP2, "num_virtual_stages_per_pipeline_rank": 2},
            {**EP2, **PP2, "num_layers_per_virtual_pipeline_stage": 1},
        ],
    ),
    "moe-overlap-precision": ([{**EP2, "bf16": False}], []),
    "moe-overlap-dispatcher": (
        [{**EP2, "moe_token_dispatcher_type": "allgather"}],
        [{"moe_token_dispatcher_type": "allgather"}],
    ),
    "moe-overlap-recompute": (
        [
            {**EP2, "recompute_granularity": "full", "recompute_method": "uniform"},
            {**EP2, "recompute_num_layers": 1},
            {**EP2, **SELECTIVE, "recompute_modules": ["core_attn", "moe"]},
            {**EP2, "moe_layer_recompute": True},
        ],
        [
            {**EP2, **SELECTIVE, "recompute_modules": ["core_attn"]},
            {"recompute_granularity": "full", "recompute_method": "uniform"},
        ],
    ),
    "moe-overlap-once": (
        [
            {**EP2, "moe_shared_expert_overlap": True},
            {**EP2, "overlap_dispatch_backward_with_experts_wgrad": True},
        ],
        [],
    ),
    "moe-overlap-details": (
        [{"ep_overlap_early_attn_memory_release": True}],
        [{**EP2, "ep_overlap_early_attn_memory_release": True}],
    ),
    "delayed-wgrad": (
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": True}],
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": False}],
    ),
}
