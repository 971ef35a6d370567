"""A model's small likeness keeps the model's structure and divides by the layout."""

import dataclasses
import functools
from argparse import Namespace
from pathlib import Path

import pytest
from pages.sizes import with_placeholder_ids

from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.hf_config import hf_config
from loongplug.training.config import available_models, compose_model
from loongplug.training.rules import hetero
from loongplug.training.rules import layout as layout_rules
from loongplug.training.rules import model as model_rules
from loongplug.verify.tiny_sizes import TinyLayout, tiny_sizes, tiny_stages

pytestmark = pytest.mark.quick

OUTSIDE = Path(__file__).resolve().parents[1] / "models" / "outside"

LAYOUTS = (
    TinyLayout(),
    TinyLayout(tp=2, encoder_tp=1),
    TinyLayout(tp=4, pp=2, encoder_tp=2),
    TinyLayout(tp=8, pp=4, vpp=2, encoder_tp=8, etp=8),
    TinyLayout(tp=1, pp=4, ep=4),
    TinyLayout(tp=2, ep=16, etp=2, encoder_tp=2),
    TinyLayout(tp=3, pp=3, etp=3, encoder_tp=3),
)


@functools.cache
def composed(name):
    return compose_model(model_name=name)


def likeness(name, layout):
    """The model with its small sizes, as the overrides would give it."""
    model = with_placeholder_ids(composed(name))
    parts = {model.keys[name]: {} for name in model.encoders} | {"foundation": {}}
    for key, value in tiny_sizes(model, layout, vocabulary=101, tiny_media=False).items():
        part, _, field = key.partition(".")
        parts[part][field] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(
        model,
        **{
            part: dataclasses.replace(getattr(model, part), **sizes)
            for part, sizes in parts.items()
        },
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", available_models())
def test_the_start_up_rules_have_nothing_against_it(name, layout):
    model = likeness(name, layout)
    family = composed(name).family
    args = Namespace(
        **{key: argument.value for key, argument in family.megatron_arguments(model).items()}
    )
    args.tensor_model_parallel_size = layout.tp
    args.pipeline_model_parallel_size = layout.pp
    args.expert_model_parallel_size = layout.ep if args.num_experts else 1
    args.expert_tensor_parallel_size = layout.etp if args.num_experts else None
    args.padded_vocab_size = model.foundation.vocab_size
    args.enable_encoder_hetero_dp = args.enable_full_hetero_dp = False
    for check in (
        *(layout_rules.tensor_parallel_sizes, hetero.encoder_sizes),
        *(model_rules.positive_sizes, model_rules.encoder_shape, model_rules.decoder_shape),
    ):
        assert check(args, model) is None, check.__name__
    if args.num_experts:
        assert args.num_experts % layout.ep == args.moe_ffn_hidden_size % (layout.etp or 1) == 0
        assert 2 <= args.moe_router_topk <= args.num_experts
    for encoder in model.encoders:
        assert model.encoder(encoder).num_attention_heads % layout.encoder_tp == 0
    assert model.foundation.num_layers % (layout.pp * layout.vpp) == 0
    hf_config(family.load_hugging_face(model))  # exchangeable, so that weights can be loaded


def test_an_mlp_that_is_a_multiple_stays_one(monkeypatch):
    """Qwen2-VL, a family from outside, says its encoder's MLP as a factor."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    model = compose_model(model_name="qwen2_vl_tiny", trusted_packages=["qwen2_vl"]).config
    for layout in LAYOUTS:
        sizes = tiny_sizes(model, layout, vocabulary=101, tiny_media=True)
        width = sizes["image_encoder.ffn_hidden_size"]
        assert width % sizes["image_encoder.hidden_size"] == 0
        assert width % layout.tp == width % layout.encoder_tp == 0


@pytest.mark.parametrize("name", available_models())
def test_the_structure_stays(name):
    whole, small = composed(name).config, likeness(name, TinyLayout(tp=2))
    assert small.foundation.tie_word_embeddings == whole.foundation.tie_word_embeddings
    for each in whole.encoders:
        encoder, likewise = whole.encoder(each), small.encoder(each)
        if hasattr(encoder, "deepstack_layers"):
            assert len(likewise.deepstack_layers) == len(encoder.deepstack_layers)
            assert max(likewise.deepstack_layers) < likewise.num_layers - 1
            assert small.foundation.num_layers > len(likewise.deepstack_layers)
        if hasattr(encoder, "full_attention_layers"):
            assert 0 < len(likewise.full_attention_layers) < likewise.num_layers
    grouped = whole.foundation.num_attention_heads > whole.foundation.num_query_groups
    text = small.foundation
    assert (text.num_attention_heads > text.num_query_groups) == grouped
    assert hasattr(text, "num_experts") == hasattr(whole.foundation, "num_experts")


def test_an_encoder_of_an_unknown_kind_stays_as_it_is():
    model = with_placeholder_ids(composed("qwen2_audio_tiny"))
    sizes = {"num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 2}
    model = dataclasses.replace(model, audio_encoder=EncoderArchitecture(**sizes))
    found = tiny_sizes(model, TinyLayout(), vocabulary=100, tiny_media=True)
    assert found
    assert all(key.startswith("foundation.") for key in found)


def test_uneven_ends_have_fewer_layers_than_the_others():
    stages = tiny_stages(TinyLayout(pp=4, vpp=2, first=True, last=True), taps=0)
    assert (stages.layers, stages.first, stages.last) == (12, 2, 2)
    stages = tiny_stages(TinyLayout(pp=2, first=True), taps=3)
    assert (stages.layers, stages.first, stages.last) == (3, 1, None)
