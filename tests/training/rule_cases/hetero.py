"""Cases of the rules in rules/hetero.py."""

from rule_cases.kinds import Cases, OverrideCases

CASES: Cases = {
    "encoder-hetero-dp": ([{"enable_encoder_hetero_dp": True}], []),
    "full-hetero-dp": ([{"enable_full_hetero_dp": True}], []),
}

OVERRIDES: OverrideCases = {
    "encoder-layout": (
        [
            (2, ["image_encoder.tensor_model_parallel_size=1"]),
            (1, ["image_encoder.tensor_model_parallel_size=2"]),
        ],
        [(2, ["image_encoder.tensor_model_parallel_size=2"])],
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
        [(2, ["image_encoder.num_attention_heads=2"])],
    ),
}

QWEN2_5_OVERRIDES: OverrideCases = {
    "encoder-sizes": (
        [(4, ["image_encoder.ffn_hidden_size=3422", "foundation.num_query_groups=4"])],
        [(4, ["image_encoder.ffn_hidden_size=3420", "foundation.num_query_groups=4"])],
    ),
}
