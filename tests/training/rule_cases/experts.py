"""Cases of the rules in rules/experts.py."""

from rule_cases.kinds import Cases

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKING = {"packing": True, "micro_batch_size": 1}
EP = {"expert_model_parallel_size": 4}

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
    "expert-count": ([{**EP, "num_experts": 6}], [{**EP, "num_experts": 12}]),
    "expert-width": (
        [
            {**SP, "moe_ffn_hidden_size": 97},
            {"expert_tensor_parallel_size": 8, "moe_ffn_hidden_size": 100},
        ],
        [
            {**SP, "moe_ffn_hidden_size": 97, "expert_tensor_parallel_size": 1},
            {**SP, "ffn_hidden_size": 97},  # no layer has it
        ],
    ),
    "shared-expert-width": (
        [{**SP, "moe_shared_expert_intermediate_size": 97}],
        [
            {**SP, "moe_shared_expert_intermediate_size": 98},
            {**EP, "moe_shared_expert_intermediate_size": 97},
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
}
