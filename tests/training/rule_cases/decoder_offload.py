"""Cases of the rules in rules/decoder_offload.py."""

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
    "decoder-offload-experts": (
        [{**NAMED, "offload_tensors": ["qkv", "dispatched_input"]}],
        [{**NAMED, "offload_tensors": ["fc2_input"]}],
    ),
}

WITH_EXPERTS: Cases = {
    "decoder-offload-experts": ([], [{**NAMED, "offload_tensors": ["dispatched_input"]}]),
}
