"""Cases of the rules in rules/model.py."""

from rule_cases.kinds import TP, Case, Cases, model

_ALONE = {"save_lora": "adapters", "freeze_parameters": ["*"]}


def _with(module: str, **settings: object) -> Case:
    """With adapters on a module."""
    return model(f"{module}.lora={ {'rank': 2, **settings} }")


_ADAPTED = "foundation.lora={'rank': 2}"
_FROZEN = ("image_encoder.freeze=True", "image_projector.freeze=True")
_SHARED = {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 48}

CASES: Cases = {
    "positive-sizes": (
        [
            model("image_encoder.patch_size=0"),
            model("image_encoder.joined_rows=0"),
            model("image_projector.lr_mult=0.0"),
            model("image_encoder.lora={'rank': 2, 'alpha': 0.0}"),
            *(_with("foundation", dropout=dropout) for dropout in (1.0, -0.5)),
        ],
        [
            model("foundation.lr_mult=0.5"),
            model("foundation.lora={'rank': 1, 'alpha': 0.5, 'dropout': 0.0}"),
        ],
    ),
    "encoder-shape": (
        [
            model("image_encoder.num_attention_heads=3"),
            model("image_encoder.num_attention_heads=32"),  # heads of 2
            model("image_encoder.num_position_embeddings=63"),
            model("image_encoder.deepstack_layers=[0,3]"),
            model("image_encoder.deepstack_layers=[1,0]"),
            model("image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=2"),
        ],
        [
            model(
                "image_encoder.num_attention_heads=16", "image_encoder.num_position_embeddings=49"
            ),
            model("image_encoder.deepstack_layers=[]"),
            model("image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=3"),
        ],
    ),
    "decoder-shape": (
        [
            model("foundation.num_query_groups=3"),
            model("foundation.kv_channels=33"),
            model("foundation.mrope_section=[6,6,6]"),
            model("foundation.mrope_section=[12,10,10]"),  # kv_channels, not half of them
            model("foundation.mrope_section=[4,6,6]"),  # no third pair is left for the sixth
        ],
        [
            model("foundation.num_query_groups=4"),
            model("foundation.kv_channels=34", "foundation.mrope_section=[7,5,5]"),
            model("foundation.mrope_section=[24,20,20]", "foundation.kv_channels=128"),
            model("foundation.mrope_section=[16,0,0]"),
        ],
    ),
    "lora-folders": ([{"save_lora": "adapters"}], []),
    "lora-targets": (
        [
            _with("foundation", target_modules=()),
            _with("foundation", target_modules=("q_proj",)),
            _with("foundation", target_modules=("linear_qkv", "mlp.linear_qkv")),
            _with("image_projector", target_modules=("linear_proj",)),
        ],
        [
            _with("foundation", target_modules=("self_attention.linear_proj", "linear_fc2")),
            _with("image_projector", target_modules=("merger.linear_fc1",)),
        ],
    ),
    "lora-beside-weights": (
        [
            model(_ADAPTED, save_lora="a"),
            model(_ADAPTED, _FROZEN[0], save_lora="a"),
            model(_ADAPTED, *_FROZEN, save_lora="a", train_parameters=["text_decoder.*norm*"]),
        ],
        [
            model(_ADAPTED, save_lora="a", save_hf="b"),
            model(_ADAPTED, save_lora="a", freeze_parameters=["image_*"]),
            model(_ADAPTED, *_FROZEN, save_lora="a"),
        ],
    ),
    "lr-mult-frozen": (
        [model("image_encoder.lr_mult=0.5", "image_encoder.freeze=True")],
        [model("image_encoder.lr_mult=0.5", "image_projector.freeze=True")],
    ),
    "lr-mult-decoupled": (
        [model("foundation.lr_mult=0.5", decoupled_lr=1e-4)],
        [{"decoupled_lr": 1e-4}],
    ),
}

OMNI: Cases = {
    "encoder-shape": (
        [
            model("audio_encoder.output_dim=64"),
            model("foundation.hidden_size=160", "foundation.ffn_hidden_size=160"),
        ],
        [model("foundation.hidden_size=160", "audio_encoder.output_dim=160", tp=2)],
    ),
}

QWEN2_5: Cases = {
    "encoder-shape": (
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

WITH_EXPERTS: Cases = {
    "lora-targets": (
        [_with("foundation", target_modules=("mlp.linear_fc1",))],  # experts are no dense linears
        [_with("foundation", target_modules=("linear_fc1",))],
    ),
    "lora-shared-experts": (
        [
            {
                **_with("foundation", target_modules=("linear_fc2",)),
                **TP,
                **_SHARED,
                "sequence_parallel": True,
            },
        ],
        [
            {**_with("foundation", target_modules=("linear_fc2",)), **_SHARED},
            {
                **_with("foundation", target_modules=("linear_qkv",)),
                **TP,
                **_SHARED,
                "sequence_parallel": True,
            },
        ],
    ),
}
