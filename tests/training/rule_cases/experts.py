"""Cases of the rules in rules/experts.py."""

from rule_cases.kinds import Cases

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKING = {"packing": True, "micro_batch_size": 1}
EP = {"expert_model_parallel_size": 4}
EP2 = {
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
}
PP2 = {"pipeline_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}

CASES: Cases = {
    "expert-parallel": (
        [{"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}],
        [{"expert_tensor_parallel_size": 1}],
    ),
    "grouped-gemm": ([{"moe_grouped_gemm": True}], []),
}

WITH_EXPERTS: Cases = {
    "expert-world": (
        [
            {**SP, **EP, "expert_tensor_parallel_size": 4},
            {**EP, "world_size": 6, "global_batch_size": 12},
            {**SP, "expert_model_parallel_size": 8},  # expert tp is tp
        ],
        [
            {**SP, **EP},
            {**SP, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1},
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
        ],
    ),
    "expert-sizes": (
        [
            {**EP, "num_experts": 6},
            {**SP, "moe_ffn_hidden_size": 97},
            {"expert_tensor_parallel_size": 8, "moe_ffn_hidden_size": 100},
        ],
        [
            {**EP, "num_experts": 12},
            {**SP, "moe_ffn_hidden_size": 97, "expert_tensor_parallel_size": 1},
        ],
    ),
    "experts-per-token": (
        [{"moe_router_topk": 1}, {"moe_router_topk": 9}],
        [{"moe_router_topk": 8}],
    ),
    "expert-sequence-parallel": ([{**SP, "sequence_parallel": False}], [SP]),
    "balancing": (
        [
            {"moe_router_load_balancing_type": ["sinkhorn"]},
            {"moe_router_load_balancing_type": "quantile_balancing"},
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            {"moe_aux_loss_coeff": [0.1, 0.1]},
            {"moe_aux_loss_coeff": [-0.1]},
        ],
        [
            {"moe_router_load_balancing_type": ["none"]},
            {
                "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.0],
            },
        ],
    ),
    "packing-balancing": (
        [{**PACKING, "moe_router_load_balancing_type": ["seq_aux_loss"]}],
        [{**PACKING, "moe_router_load_balancing_type": ["aux_loss"]}],
    ),
    "capacity-balancing": (
        [{"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": ["seq_aux_loss"]}],
        [
            {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": ["aux_loss"]},
            {"moe_router_load_balancing_type": ["seq_aux_loss"]},
        ],
    ),
    "padded-capacity": (
        [{"moe_pad_expert_input_to_capacity": True}],
        [{"moe_pad_expert_input_to_capacity": False}],
    ),
    "dispatcher": (
        [{"moe_token_dispatcher_type": "flex"}],
        [{"moe_token_dispatcher_type": "allgather"}],
    ),
    "moe-overlap-stages": (
        [{**EP2, **PP2}],
        [
            {**EP2, **PP2, "num_virtual_stages_per_pipeline_rank": 2},
            {**EP2, **PP2, "num_layers_per_virtual_pipeline_stage": 1},
        ],
    ),
    "moe-overlap-precision": ([{**EP2, "bf16": False}], []),
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
    "moe-overlap-details": (
        [{"ep_overlap_early_attn_memory_release": True}],
        [{**EP2, "ep_overlap_early_attn_memory_release": True}],
    ),
    "delayed-wgrad": (
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": True}],
        [{**EP2, "delay_wgrad_compute": True, "gradient_accumulation_fusion": False}],
    ),
}
