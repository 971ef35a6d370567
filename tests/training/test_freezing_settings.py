"""What the model's YAML and the command line together freeze."""

from argparse import Namespace

import pytest

from loongplug.training.config import compose_model
from loongplug.training.freezing import freezing_of

pytestmark = pytest.mark.quick

LAYER = ("blocks.layers.0.self_attention.linear_qkv", "decoder.layers.0.mlp.linear_fc1")
ENCODER, DECODER = f"image_encoder.{LAYER[0]}", f"text_decoder.{LAYER[1]}"
NAMES = [f"{each}{end}" for each in (ENCODER, DECODER) for end in (".weight", "_lora.a", "_lora.b")]
LORA = ("+model.image_encoder.lora.rank=2", "+model.foundation.lora.rank=2")
FROZEN = tuple(
    f"+model.{name}.freeze=true" for name in ("image_encoder", "image_projector", "foundation")
)


@pytest.mark.parametrize(
    ("overrides", "freeze", "train", "expected"),
    [
        (LORA, (), (), (1, 2, 4, 5)),
        ((*LORA, *FROZEN), (), (), (1, 2, 4, 5)),  # what freeze says of the module, lora says too
        ((LORA[1], *FROZEN), (), (), (4, 5)),
        (LORA, ("*_lora.a",), (), (2, 5)),
        (LORA, ("image_encoder.*",), ("*qkv.weight",), (0, 4, 5)),
        (LORA, ("*",), ("*_lora.b",), (2, 5)),
    ],
)
def test_patterns_freeze_adapters_and_modules_do_not(overrides, freeze, train, expected):
    model = compose_model(model_name="qwen3_vl_tiny", overrides=overrides).config
    args = Namespace(freeze_parameters=freeze, train_parameters=train)
    freezing = freezing_of(args, model)
    assert [name for name in NAMES if freezing.trains(name)] == [NAMES[each] for each in expected]
