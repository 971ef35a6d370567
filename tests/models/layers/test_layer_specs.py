"""What layer specs name: parts of TransformerEngine's, and what is refused."""

from dataclasses import replace

import pytest
from layer_configs import decoder_config, vision_config
from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp

from loongplug.models.layers import specs
from loongplug.models.layers.attention import RotarySelfAttention
from loongplug.models.layers.context.engine import over_parts_of_rows
from loongplug.models.layers.router import BalancedRouter
from loongplug.models.layers.specs import decoder_layer_spec, final_norm, vision_layer_spec


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine as specs see it: classes by name, none of them ever built."""
    for name in vars(transformer_engine_spec_provider):
        if name.startswith("TE") and name != "TESpecProvider":
            monkeypatch.setattr(transformer_engine_spec_provider, name, type(name, (), {}))
    monkeypatch.setattr(transformer_engine_spec_provider, "is_te_min_version", lambda _: True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", specs.TESpecProvider)
    monkeypatch.setattr(specs, "HAVE_TE", True)


@pytest.mark.quick
@pytest.mark.usefixtures("te")
def test_the_te_spec_is_upstreams_but_for_rope_and_mask() -> None:
    config = decoder_config()
    upstream = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=True
    ).submodules
    for build_spec, mask in (
        (decoder_layer_spec, AttnMaskType.causal),
        (vision_layer_spec, AttnMaskType.no_mask),
    ):
        ours = build_spec(config, backend="te").submodules
        assert ours.self_attention.module is RotarySelfAttention
        assert ours.self_attention.params == {"attn_mask_type": mask}
        assert ours.self_attention.submodules == upstream.self_attention.submodules
        names = [part.__name__ for part in vars(ours.self_attention.submodules).values()]
        assert names == [
            "TELayerNormColumnParallelLinear",
            "TEDotProductAttention",
            "TERowParallelLinear",
            "TENorm",
            "TENorm",
        ]
        # the norms are inside the linears that follow them
        assert ours.input_layernorm is upstream.input_layernorm is IdentityOp
        assert ours.pre_mlp_layernorm is upstream.pre_mlp_layernorm is IdentityOp
        assert ours.mlp.func == upstream.mlp.func
        assert ours.mlp.keywords == upstream.mlp.keywords
        assert ours.self_attn_bda is upstream.self_attn_bda
        assert ours.mlp_bda is upstream.mlp_bda


@pytest.mark.quick
@pytest.mark.usefixtures("te")
def test_only_attention_is_another_under_te_where_rows_are_split() -> None:
    whole, split = decoder_config(), decoder_config(context_parallel_size=2)
    theirs = decoder_layer_spec(whole, backend="te").submodules
    ours = decoder_layer_spec(split, backend="te").submodules
    engine = transformer_engine_spec_provider.TEDotProductAttention
    parts, rest = ours.self_attention.submodules, theirs.self_attention.submodules
    assert rest.core_attention is engine
    assert parts.core_attention is over_parts_of_rows(engine)
    assert replace(parts, core_attention=engine) == rest
    assert (ours.input_layernorm, ours.mlp.keywords) == (IdentityOp, theirs.mlp.keywords)
    # Encoders see whole images, whatever the decoder's ranks share.
    vision = vision_layer_spec(vision_config(), backend="te").submodules.self_attention
    assert vision.submodules.core_attention is engine


@pytest.mark.quick
@pytest.mark.usefixtures("te")
def test_local_checkpoints_carry_the_names_of_fused_norms() -> None:
    dense = decoder_layer_spec(decoder_config(), backend="local").submodules
    assert dense.sharded_state_dict_keys_map == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    experts = decoder_config(num_moe_experts=4)
    mixture = decoder_layer_spec(experts, backend="local").submodules
    assert list(mixture.sharded_state_dict_keys_map) == ["input_layernorm."]
    fused = decoder_layer_spec(decoder_config(), backend="te").submodules
    assert fused.sharded_state_dict_keys_map == {}


@pytest.mark.quick
@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("grouped", [True, False])
def test_a_mixture_under_te_keeps_its_norm_and_groups_experts_when_asked(grouped: bool) -> None:
    config = decoder_config(num_moe_experts=4, moe_grouped_gemm=grouped)
    mixture = decoder_layer_spec(config, backend="te").submodules
    upstream = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=4).submodules
    assert mixture.pre_mlp_layernorm is upstream.pre_mlp_layernorm is not IdentityOp
    experts = mixture.mlp.keywords["submodules"]
    assert experts.router is BalancedRouter
    assert (experts.experts.func is transformer_engine_spec_provider.TEGroupedMLP) == grouped


@pytest.mark.quick
def test_a_grouped_gemm_is_refused_without_te() -> None:
    with pytest.raises(ValueError, match="moe_grouped_gemm needs TransformerEngine"):
        decoder_layer_spec(
            decoder_config(num_moe_experts=4, moe_grouped_gemm=True), backend="local"
        )


@pytest.mark.quick
def test_te_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "HAVE_TE", False)
    with pytest.raises(ValueError, match="transformer_engine cannot be imported"):
        final_norm(decoder_config(), "te")
