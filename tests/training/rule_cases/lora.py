"""Cases of the rules in rules/lora.py."""

from rule_cases.kinds import TP, Case, Cases, model

_ALONE = {"save_lora": "adapters", "freeze_parameters": ["*"]}


def _with(module: str, **settings: object) -> Case:
    """With adapters on a module."""
    return model(f"{module}.lora={ {'rank': 2, **settings} }")


_ADAPTED = "foundation.lora={'rank': 2}"
_FROZEN = ("image_encoder.freeze=True", "image_projector.freeze=True")
_SHARED = {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 48}

CASES: Cases = {
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
