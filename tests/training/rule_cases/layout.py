"""Cases of the rules in rules/layout.py."""

from rule_cases.kinds import LAYOUT, PP, TP, Cases, model

_CP = {**LAYOUT, "context_parallel_size": 2}
_PACKED = {**_CP, "packing": True, "micro_batch_size": 1}
_TP4 = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "num_query_groups": 4}
_CP_TP = {**TP, "context_parallel_size": 2}


def _lora(module: str) -> str:
    return f"{module}.lora={{'rank': 2, 'dropout': 0.1}}"


_EVALUATED = {"valid_data_path": [__file__], "eval_global_batch_size": 8}
_SHARED = {**TP, "sequence_parallel": True}

CASES: Cases = {
    "world-size": (
        [{**TP, "world_size": 7}, {**PP, "world_size": 3}],
        [TP, {**TP, **PP}, {**TP, "world_size": 6, "global_batch_size": 12}],
    ),
    "equal-parts": (
        [
            {**TP, "expert_tensor_parallel_size": 4},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 6},
            {**PP, "num_layers_per_virtual_pipeline_stage": 2, "num_layers": 6},
        ],
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 3, "num_layers": 6},
            {**PP, "num_layers_per_virtual_pipeline_stage": 1, "num_layers": 6},
        ],
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
    "row-parts": (
        [
            {**_CP, "seq_length": 66},
            {**TP, "sequence_parallel": True, "seq_length": 63},
            {**LAYOUT, **_TP4, "context_parallel_size": 2, "seq_length": 60},
        ],
        [{**TP, "seq_length": 63}, {**LAYOUT, **_TP4, "context_parallel_size": 2}],
    ),
    "context-parallel-communication": (
        [
            {**_CP, "cp_comm_type": ["a2a+p2p"]},
            {**_CP, "cp_comm_type": ["p2p", "a2a"]},
            {**_CP_TP, "cp_comm_type": ["a2a"]},
            {**_CP, "cp_balance": "lpt"},
            {**_PACKED, "cp_balance": "lpt", "cp_comm_type": ["p2p"]},
        ],
        [
            {**_CP, "cp_comm_type": ["a2a"]},
            {**_CP_TP, "cp_comm_type": ["p2p"]},
            {**TP, "cp_comm_type": ["a2a+p2p"]},
            {**_PACKED, "cp_balance": "lpt"},
            {**LAYOUT, "cp_balance": "lpt"},
        ],
    ),
    "context-parallel-dropout": (
        [
            {**_CP, "attention_dropout": 0.1},
            {**_CP, "hidden_dropout": 0.1},
            {**_CP, "model": [_lora("foundation")]},
        ],
        [
            {**LAYOUT, "attention_dropout": 0.1},
            {**LAYOUT, "model": [_lora("foundation")]},
            # An encoder's may drop: its ranks have the same media.
            {**_CP, "model": [_lora("image_encoder"), _lora("image_projector")]},
        ],
    ),
}

WITH_EXPERTS: Cases = {
    "equal-parts": (
        [
            {"expert_model_parallel_size": 16},
            {"expert_model_parallel_size": 3, "world_size": 3, "global_batch_size": 6},
            {"moe_ffn_hidden_size": 95, "expert_tensor_parallel_size": 2},
            {"moe_router_topk": 9},
            {"moe_router_topk": 1},
        ],
        [{"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}],
    ),
    "tensor-parallel-sizes": (
        [{**_SHARED, "moe_shared_expert_intermediate_size": 97}],
        [
            {**_SHARED, "moe_shared_expert_intermediate_size": 98},
            {**_SHARED, "ffn_hidden_size": 97},  # no layer has it
            {"expert_model_parallel_size": 4, "moe_shared_expert_intermediate_size": 97},
        ],
    ),
}
