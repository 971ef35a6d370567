"""Cases of the rules in rules/lora.py."""

from typing import Any

from loongplug.models.lora import LoraSettings
from rule_cases.kinds import Cases, OverrideCases

CASES: Cases = {
    "lora-folders": ([{"save_lora": "adapters"}], []),
}


def lora(**settings: Any) -> LoraSettings:
    return LoraSettings(**{"rank": 2, **settings})


# Settings of a module's adapters, by the module.
ADAPTERS: dict[str, tuple[list[tuple[str, LoraSettings]], list[tuple[str, LoraSettings]]]] = {
    "lora-numbers": (
        [
            ("foundation", lora(rank=0)),
            ("image_encoder", lora(alpha=0.0)),
            ("image_projector", lora(dropout=1.0)),
            ("foundation", lora(dropout=-0.1)),
        ],
        [("foundation", lora(rank=1, alpha=0.5, dropout=0.0)), ("image_encoder", lora())],
    ),
    "lora-targets": (
        [
            ("foundation", lora(target_modules=())),
            ("foundation", lora(target_modules=("q_proj",))),
            ("foundation", lora(target_modules=("linear_qkv", "mlp.linear_qkv"))),
            ("foundation", lora(target_modules=("qkv",))),
            ("image_projector", lora(target_modules=("linear_proj",))),
        ],
        [
            ("foundation", lora(target_modules=("self_attention.linear_proj", "linear_fc2"))),
            ("image_projector", lora(target_modules=("merger.linear_fc1",))),
            ("image_projector", lora()),
        ],
    ),
}
OVERRIDES: OverrideCases = {
    "lr-mult": (
        [(1, ["image_projector.lr_mult=0.0"]), (1, ["foundation.lr_mult=-1.0"])],
        [(1, ["foundation.lr_mult=0.5"])],
    ),
    "lr-mult-frozen": (
        [(1, ["image_encoder.lr_mult=0.5", "image_encoder.freeze=True"])],
        [(1, ["image_encoder.lr_mult=0.5", "image_projector.freeze=True"])],
    ),
}
