"""Cases of the rules in rules/experts.py."""

from rule_cases.kinds import Cases

ON = {"fine_grained_activation_offloading": True}
NAMED = {**ON, "offload_tensors": ["qkv"], "gradient_accumulation_fusion": False}
NODES = {"recompute_modules": ["a2a_overlap_attn"], "recompute_granularity": "selective"}
OVERLAP = {
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
    "world_size": 2,
}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKING = {"packing": True, "micro_batch_size": 1}
_BY_SAMPLE = {"moe_router_load_balancing_type": ["seq_aux_loss"]}
EP = {"expert_model_parallel_size": 4}
EP2 = {
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
}
PP2 = {"pipeline_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}

CASES: Cases = {
    "grouped-gemm": ([{"moe_grouped_gemm": True}], []),
    "decoder-offload": (
        [{"offload_tensors": ["qkv"], "gradient_accumulation_fusion": False}],
        [NAMED, {**ON, "offload_modules": ["core_attn"]}],
    ),
    "decoder-offload-twice": (
        [{**NAMED, "offload_modules": ["core_attn"]}, {**NAMED, "recompute_granularity": "full"}],
        [{**NAMED, **SELECTIVE}],
    ),
    "decoder-recompute-discarded": (
        [{"recompute_modules": ["core_attn", "layernorm"]}, {"recompute_modules": ["moe_act"]}],
        [
            {"recompute_modules": ["core_attn", "mlp"]},
        ],
    ),
}

WITH_EXPERTS: Cases = {
    "balancing": (
        [
            {"moe_router_load_balancing_type": ["sinkhorn"]},
            {"moe_router_load_balancing_type": "quantile_balancing"},
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            {"moe_aux_loss_coeff": -0.1},
        ],
        [
            {"moe_router_load_balancing_type": ["none"]},
            {
                "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.0],
            },
        ],
    ),
    "balancing-by-sample": (
        [{**each, **_BY_SAMPLE} for each in (PACKING, {"moe_expert_capacity_factor": 1.0})],
        [{**PACKING, "moe_router_load_balancing_type": ["aux_loss"]}, _BY_SAMPLE],
    ),
    "expert-sequence-parallel": ([{**SP, "sequence_parallel": False}], [SP]),
    "moe-overlap-precision": ([{**EP2, "bf16": False}], []),
    "moe-overlap-details": (
        [{"ep_overlap_early_attn_memory_release": True}],
        [{**EP2, "ep_overlap_early_attn_memory_release": True}],
    ),
    "delayed-wgrad": (
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": True}],
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": False}],
    ),
    "decoder-recompute-nodes": (
        [NODES, {**OVERLAP, "recompute_modules": ["a2a_overlap_mlp", "core_attn"]}],
        [{**OVERLAP, **NODES}],
    ),
    "decoder-recompute-nodes-alone": (
        [{**OVERLAP, **NODES, **ON, "offload_modules": ["core_attn"]}],
        [{**OVERLAP, **ON, "offload_modules": ["core_attn"]}],
    ),
}
