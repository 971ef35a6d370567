"""Cases of the rules in rules/decoder_memory.py."""

from rule_cases.kinds import Cases

ON = {"fine_grained_activation_offloading": True}
NAMED = {**ON, "offload_tensors": ["qkv"], "gradient_accumulation_fusion": False}

CASES: Cases = {
    "decoder-offload": (
        [
            ON,
            {"offload_tensors": ["qkv"], "gradient_accumulation_fusion": False},
            {**NAMED, "offload_modules": ["core_attn"]},
        ],
        [NAMED, {**ON, "offload_modules": ["core_attn"]}, {"offload_modules": ["core_attn"]}],
    ),
    "decoder-offload-recompute": (
        [{**NAMED, "recompute_granularity": "full", "recompute_method": "uniform"}],
        [{**NAMED, "recompute_granularity": "selective"}],
    ),
    "decoder-offload-fusion": (
        [{**NAMED, "gradient_accumulation_fusion": True}],
        [{**ON, "offload_modules": ["core_attn"], "gradient_accumulation_fusion": True}],
    ),
    "decoder-recompute-discarded": (
        [{"recompute_modules": ["core_attn", "layernorm"]}, {"recompute_modules": ["moe_act"]}],
        [
            {"recompute_modules": ["core_attn", "mlp"]},
        ],
    ),
}

NODES = {"recompute_modules": ["a2a_overlap_attn"], "recompute_granularity": "selective"}
OVERLAP = {
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
    "world_size": 2,
}

WITH_EXPERTS: Cases = {
    "decoder-recompute-nodes": (
        [NODES, {**OVERLAP, "recompute_modules": ["a2a_overlap_mlp", "core_attn"]}],
        [{**OVERLAP, **NODES}],
    ),
    "decoder-recompute-nodes-alone": (
        [{**OVERLAP, **NODES, **ON, "offload_modules": ["core_attn"]}],
        [{**OVERLAP, **ON, "offload_modules": ["core_attn"]}],
    ),
}
