"""Which parameters patterns choose."""

import pytest

from loongplug.models.freezing import Freezing, closest_names, idle_pattern

pytestmark = pytest.mark.quick

NAMES = [
    "image_encoder.blocks.layers.0.self_attention.linear_qkv.weight",
    "image_encoder.blocks.layers.1.self_attention.linear_qkv.bias",
    "image_projector.merger.linear_fc1.weight",
    "text_decoder.embedding.word_embeddings.weight",
    "text_decoder.decoder.layers.1.mlp.linear_fc1.weight",
    "text_decoder.decoder.layers.11.mlp.linear_fc1.weight",
    "text_decoder.decoder.layers.11.mlp.linear_fc1_lora.a",
]


def trained(**settings):
    return [name for name in NAMES if Freezing(**settings).trains(name)]


def test_all_train_unless_something_is_said():
    assert trained() == NAMES


def test_a_module_is_frozen_by_its_whole_name():
    assert trained(modules=("image_encoder", "text")) == NAMES[2:]


def test_a_pattern_is_of_the_whole_name_and_its_star_crosses_dots():
    assert trained(freeze=("linear_fc1", "*.layers.1.*")) == [
        name for name in NAMES if ".layers.1." not in name
    ]


def test_what_is_to_train_wins_over_modules_and_patterns():
    kept = trained(modules=("image_encoder",), freeze=("*",), train=("*.bias", "*lora*"))
    assert kept == [NAMES[1], NAMES[6]]


def test_adapters_are_an_exception_from_their_module_and_from_no_pattern():
    adapted = {"adapted": ("image_encoder", "text_decoder")}
    assert trained(**adapted) == [NAMES[2], NAMES[6]]
    assert trained(**adapted, freeze=("*_lora.a",)) == [NAMES[2]]
    assert trained(**adapted, freeze=("*",), train=("*_lora.?", "*word*")) == [NAMES[3], NAMES[6]]


def test_what_is_frozen_or_trains_all_the_same_needs_no_pattern_to_freeze():
    for settings, idle in (
        ({"modules": ("text_decoder",)}, {"*.layers.11.*", "*_lora.*"}),
        ({"adapted": ("text_decoder",)}, set()),
        ({"adapted": ("text_decoder",), "train": ("*lora*",)}, {"*.layers.11.*", "*_lora.*"}),
        ({"train": ("*_lora.?",)}, {"*_lora.*"}),
    ):
        freezing = Freezing(freeze=("*.layers.11.*", "*_lora.*"), **settings)
        assert freezing.without_effect(NAMES) == idle, settings
    told = idle_pattern("*_lora.*", flag="--freeze-parameters", names=NAMES, matches=True)
    assert "frozen with their module, or that --train-parameters lets train" in told


def test_patterns_without_effect():
    freezing = Freezing(
        modules=("image_encoder",), freeze=("*fc1*", "*fc9*"), train=("*qkv*", "*word*", "*.x")
    )
    assert freezing.without_effect(NAMES) == {"*fc9*", "*word*", "*.x"}
    assert freezing.without_effect(NAMES[:1]) == {"*fc1*", "*fc9*", "*word*", "*.x"}


@pytest.mark.parametrize(
    ("pattern", "closest"),
    [
        ("*linear_qvk*", "image_encoder.blocks.layers.*.self_attention.linear_qkv.weight"),
        ("word_embeddings", "text_decoder.embedding.word_embeddings.weight"),
        ("image_projectr.*", "image_projector.merger.linear_fc1.weight"),
    ],
)
def test_the_closest_names(pattern, closest):
    assert closest in closest_names(pattern, NAMES)[:2]
    assert closest in idle_pattern(pattern, flag="--x", names=NAMES, matches=False)
