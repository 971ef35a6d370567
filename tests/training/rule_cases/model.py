"""Cases of the rules in rules/model.py."""

from rule_cases.kinds import OverrideCases

OVERRIDES: OverrideCases = {
    "positive-sizes": (
        [
            (1, ["image_encoder.patch_size=0"]),
            (1, ["foundation.layernorm_epsilon=0"]),
            (1, ["image_projector.layernorm_epsilon=0"]),
        ],
        [],
    ),
    "joined-rows": (
        [(1, ["image_encoder.joined_rows=0"]), (1, ["image_encoder.joined_rows=-1"])],
        [(1, ["image_encoder.joined_rows=1"])],
    ),
    "query-groups": (
        [(1, ["foundation.num_query_groups=3"])],
        [(1, ["foundation.num_query_groups=4"])],
    ),
    "encoder-shape": (
        [
            (1, ["image_encoder.num_attention_heads=3"]),
            (1, ["image_encoder.num_attention_heads=32"]),  # heads of 2
            (1, ["image_encoder.num_position_embeddings=63"]),
        ],
        [(1, ["image_encoder.num_attention_heads=16", "image_encoder.num_position_embeddings=49"])],
    ),
    "deepstack": (
        [
            (1, ["image_encoder.deepstack_layers=[0,3]"]),
            (1, ["image_encoder.deepstack_layers=[-1]"]),
            (1, ["image_encoder.deepstack_layers=[1,0]"]),
            (1, ["image_encoder.deepstack_layers=[1,1]"]),
            (1, ["image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=2"]),
        ],
        [
            (1, ["image_encoder.deepstack_layers=[]"]),
            (1, ["image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=3"]),
        ],
    ),
    "head-channels": (
        [(1, ["foundation.kv_channels=33"])],
        [(1, ["foundation.kv_channels=34", "foundation.mrope_section=[7,5,5]"])],
    ),
    "mrope": (
        [
            (1, ["foundation.mrope_section=[6,6,6]"]),
            (1, ["foundation.mrope_section=[12,10,10]"]),  # kv_channels, not half of them
            (1, ["foundation.mrope_section=[4,6,6]"]),  # no third pair is left for the sixth
        ],
        [
            (1, ["foundation.mrope_section=[6,5,5]"]),
            (1, ["foundation.mrope_section=[24,20,20]", "foundation.kv_channels=128"]),
            (1, ["foundation.mrope_section=[16,0,0]"]),
        ],
    ),
}

OMNI_OVERRIDES: OverrideCases = {
    "audio-output": (
        [
            (1, ["audio_encoder.output_dim=64"]),
            (1, ["foundation.hidden_size=160", "foundation.ffn_hidden_size=160"]),
        ],
        [(2, ["foundation.hidden_size=160", "audio_encoder.output_dim=160"])],
    ),
}

QWEN2_5_OVERRIDES: OverrideCases = {
    "windows": (
        [
            (1, ["image_encoder.window_size=31"]),
            (1, ["image_encoder.full_attention_layers=[1,4]"]),
            (1, ["image_encoder.full_attention_layers=[-1]"]),
            (1, ["image_encoder.full_attention_layers=[3,1]"]),
            (1, ["image_encoder.full_attention_layers=[1,1]"]),
        ],
        [
            (1, ["image_encoder.window_size=70"]),
            (1, ["image_encoder.full_attention_layers=[]"]),
            (2, ["image_encoder.full_attention_layers=[0,1,2,3]"]),
        ],
    ),
}
