"""Cases of the rules in rules/hetero.py."""

from rule_cases.kinds import TP, Cases, OverrideCases

BALANCE = {"use_vit_dp_balance": True, "enable_full_hetero_dp": True}

FULL = {"enable_full_hetero_dp": True}
OFFLOAD = ("full_hetero_dp_cpu_offload", "offload_encoder_activations", "offload_encoder_state")

CASES: Cases = {
    "offload": (
        [
            *({name: True} for name in OFFLOAD),
            {"enable_encoder_hetero_dp": True, "offload_encoder_state": True},
        ],
        [{**FULL, name: True} for name in OFFLOAD],
    ),
    "offload-fusion": (
        [{**FULL, "offload_encoder_activations": True, "gradient_accumulation_fusion": True}],
        [{**FULL, "offload_encoder_state": True, "gradient_accumulation_fusion": True}],
    ),
    "offload-nccl": (
        [{**FULL, "offload_encoder_state": True, "nccl_ub": True}],
        [{**FULL, "full_hetero_dp_cpu_offload": True, "nccl_ub": True}],
    ),
    "offload-optimizer": (
        [{**FULL, "offload_encoder_state": True, "optimizer_cpu_offload": True}],
        [
            {**FULL, "full_hetero_dp_cpu_offload": True, "optimizer_cpu_offload": True},
            {"optimizer_cpu_offload": True},
        ],
    ),
    "one-mode": (
        [{"enable_encoder_hetero_dp": True, "enable_full_hetero_dp": True}],
        [{"enable_encoder_hetero_dp": True}, {"enable_full_hetero_dp": True}],
    ),
    "balance": (
        [
            {"use_vit_dp_balance": True},
            {"use_vit_dp_balance": True, "enable_encoder_hetero_dp": True},
        ],
        [BALANCE],
    ),
    "balance-threshold": (
        [
            {"dp_balance_trigger_threshold_vit": 0.1},
            {**BALANCE, "dp_balance_trigger_threshold_vit": -0.1},
        ],
        [{**BALANCE, "dp_balance_trigger_threshold_vit": 0.0}],
    ),
}

OWN_LAYOUT: Cases = {
    "encoder-state": (
        [
            {**TP, "log_params_norm": True},
            {**TP, "log_num_zeros_in_grad": True},
            {**TP, "num_distributed_optimizer_instances": 2},
        ],
        [TP],
    ),
}

OVERRIDES: OverrideCases = {
    "encoder-layout": (
        [
            (1, ["image_encoder.tensor_model_parallel_size=2"]),
            (2, ["image_encoder.tensor_model_parallel_size=3"]),
        ],
        [
            (2, ["image_encoder.tensor_model_parallel_size=2"]),
            (2, ["image_encoder.tensor_model_parallel_size=1"]),
        ],
    ),
    "encoder-mode": (
        [(1, ["image_encoder.mode='separated'"])],
        [(2, ["image_encoder.mode='uniform'"]), (2, ["image_encoder.mode='full_hetero_dp'"])],
    ),
    "encoder-sizes": (
        [
            (2, ["image_encoder.num_attention_heads=1"]),
            (2, ["image_encoder.ffn_hidden_size=127"]),
            (
                2,
                [
                    "image_encoder.hidden_size=20",
                    "image_encoder.num_attention_heads=1",
                    "image_encoder.spatial_merge_size=1",
                ],
            ),
        ],
        [
            (2, ["image_encoder.num_attention_heads=2"]),
            (
                2,
                [
                    "image_encoder.num_attention_heads=1",
                    "image_encoder.tensor_model_parallel_size=1",
                ],
            ),
        ],
    ),
}

QWEN2_5_OVERRIDES: OverrideCases = {
    "encoder-sizes": (
        [(4, ["image_encoder.ffn_hidden_size=3422", "foundation.num_query_groups=4"])],
        [(4, ["image_encoder.ffn_hidden_size=3420", "foundation.num_query_groups=4"])],
    ),
}
