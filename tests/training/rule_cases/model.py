"""Cases of the rules in rules/model.py."""

from rule_cases.kinds import Cases, model

CASES: Cases = {
    "positive-sizes": (
        [
            model("image_encoder.patch_size=0"),
            model("image_encoder.joined_rows=0"),
            model("image_projector.lr_mult=0.0"),
            model("image_encoder.lora={'rank': 2, 'alpha': 0.0}"),
        ],
        [
            model("foundation.lr_mult=0.5"),
            model("foundation.lora={'rank': 1, 'alpha': 0.5, 'dropout': 0.0}"),
        ],
    ),
    "query-groups": (
        [model("foundation.num_query_groups=3")],
        [model("foundation.num_query_groups=4")],
    ),
    "encoder-shape": (
        [
            model("image_encoder.num_attention_heads=3"),
            model("image_encoder.num_attention_heads=32"),  # heads of 2
            model("image_encoder.num_position_embeddings=63"),
        ],
        [model("image_encoder.num_attention_heads=16", "image_encoder.num_position_embeddings=49")],
    ),
    "deepstack": (
        [
            model("image_encoder.deepstack_layers=[0,3]"),
            model("image_encoder.deepstack_layers=[1,0]"),
            model("image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=2"),
        ],
        [
            model("image_encoder.deepstack_layers=[]"),
            model("image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=3"),
        ],
    ),
    "head-channels": (
        [model("foundation.kv_channels=33")],
        [model("foundation.kv_channels=34", "foundation.mrope_section=[7,5,5]")],
    ),
    "mrope": (
        [
            model("foundation.mrope_section=[6,6,6]"),
            model("foundation.mrope_section=[12,10,10]"),  # kv_channels, not half of them
            model("foundation.mrope_section=[4,6,6]"),  # no third pair is left for the sixth
        ],
        [
            model("foundation.mrope_section=[6,5,5]"),
            model("foundation.mrope_section=[24,20,20]", "foundation.kv_channels=128"),
            model("foundation.mrope_section=[16,0,0]"),
        ],
    ),
}

OMNI: Cases = {
    "audio-output": (
        [
            model("audio_encoder.output_dim=64"),
            model("foundation.hidden_size=160", "foundation.ffn_hidden_size=160"),
        ],
        [model("foundation.hidden_size=160", "audio_encoder.output_dim=160", tp=2)],
    ),
}

QWEN2_5: Cases = {
    "windows": (
        [
            model("image_encoder.window_size=31"),
            model("image_encoder.full_attention_layers=[1,4]"),
            model("image_encoder.full_attention_layers=[3,1]"),
        ],
        [
            model("image_encoder.window_size=70"),
            model("image_encoder.full_attention_layers=[]"),
            model("image_encoder.full_attention_layers=[0,1,2,3]", tp=2),
        ],
    ),
}
