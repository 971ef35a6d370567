"""Whole layers from the local spec: two tensor-parallel ranks against one; and the TE spec."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_configs import decoder_config, vision_config
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers import specs
from loongplug.models.layers.context.engine import over_parts_of_rows
from loongplug.models.layers.norm import RMSNorm
from loongplug.models.layers.packed import pack_segments
from loongplug.models.layers.rope import RotarySelfAttention, rope_table
from loongplug.models.layers.specs import (
    decoder_layer_spec,
    final_norm,
    vision_layer_spec,
)

# Segments of a pack whose total divides by two, in an order that grouping has to undo.
SEGMENTS = [4, 6, 4, 0, 2, 6]
Numbers = dict[str, Tensor]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(kind: str, **overrides: Any) -> tuple[TransformerConfig, TransformerLayer]:
    if kind == "decoder":
        config = decoder_config(**overrides)
        spec = decoder_layer_spec(config, backend="local")
    else:
        config = vision_config(**overrides)
        spec = vision_layer_spec(config, backend="local")
    layer = build_module(spec, config=config, layer_number=1)
    layer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    return config, layer


def shard_axis(name: str) -> int | None:
    """The axis of a full parameter that tensor parallelism splits."""
    if "linear_qkv" in name or "linear_fc1" in name:
        return 0
    if name.endswith("weight") and ("linear_proj" in name or "linear_fc2" in name):
        return 1
    return None


def shard(full: Tensor, name: str, rank: int, tp: int, *, gated: bool) -> Tensor:
    axis = shard_axis(name)
    if axis is None:
        return full
    if gated and "linear_fc1" in name:
        gate, up = full.chunk(2)
        return torch.cat((gate.chunk(tp)[rank], up.chunk(tp)[rank]))
    return full.chunk(tp, dim=axis)[rank]


def full_parameters(layer: TransformerLayer, tp: int) -> Numbers:
    """The same full tensors on every rank of every layout, from the name's place in the list."""
    full = {}
    for seed, (name, parameter) in enumerate(sorted(layer.named_parameters())):
        shape = list(parameter.shape)
        axis = shard_axis(name)
        if axis is not None:
            shape[axis] *= tp
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        full[name] = 0.3 * randn(100 + seed, *shape) + offset
    return full


def run_layer(rank: int, *, kind: str, tp: int, sequence_parallel: bool) -> Numbers:
    """Output, input gradient and local parameter gradients after Megatron's own reduction."""
    with model_parallel(tp=tp):
        config, layer = build(
            kind, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel
        )
        gated = config.gated_linear_unit
        full = full_parameters(layer, tp)
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(shard(full[name], name, rank, tp, gated=gated))
        params: PackedSeqParams | None = None
        s, b = 10, 3
        if kind == "vision":
            params = pack_segments(SEGMENTS, device="cpu")
            s, b = sum(SEGMENTS), 1
        x = randn(1, s, b, config.hidden_size)
        table = rope_table(randn(2, s, b, 1, 4), dtype=torch.float32)
        weights = randn(3, s, b, config.hidden_size)
        if sequence_parallel:
            x, weights = (full.chunk(tp)[rank].clone() for full in (x, weights))
        x.requires_grad_()
        output, _ = layer(x, None, rotary_pos_emb=table, packed_seq_params=params)
        (output * weights).sum().backward()
        _allreduce_non_tensor_model_parallel_grads(
            [layer], config, get_tensor_model_parallel_group()
        )
        numbers = {"output": output.detach(), "input": x.grad}
        if sequence_parallel:
            numbers = {
                name: gather_from_sequence_parallel_region(value, False)
                for name, value in numbers.items()
            }
        numbers |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        return {name: value.clone() for name, value in numbers.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "vision"])
def test_two_tensor_parallel_ranks_compute_what_one_does(
    kind: str, sequence_parallel: bool
) -> None:
    (one,) = run_ranks(run_layer, 1, kind=kind, tp=1, sequence_parallel=False)
    two = run_ranks(run_layer, 2, kind=kind, tp=2, sequence_parallel=sequence_parallel)
    for rank, numbers in enumerate(two):
        assert numbers.keys() == one.keys()
        for name, full in one.items():
            expected = shard(full, name, rank, 2, gated=kind == "decoder")
            difference = (numbers[name] - expected).abs().max() / full.abs().max()
            assert difference < 5e-6, (name, rank, difference)


def _block(rank: int, *, recompute: bool) -> Numbers:
    changes: dict[str, Any] = {"num_layers": 2}
    if recompute:
        changes |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    with model_parallel():
        config = decoder_config(**changes)
        spec = decoder_layer_spec(config, backend="local")
        block = TransformerBlock(
            config,
            TransformerBlockSubmodules(
                layer_specs=[spec] * 2, layer_norm=final_norm(config, "local")
            ),
        )
        assert isinstance(block.final_layernorm, RMSNorm)
        x = randn(1, 6, 2, config.hidden_size).requires_grad_()
        table = rope_table(randn(2, 6, 2, 1, 4), dtype=torch.float32)
        output = block(x, None, rotary_pos_emb=table)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
        return {"output": output.detach(), "input": x.grad} | gradients


def test_a_block_gives_the_same_numbers_when_it_recomputes() -> None:
    (plain,) = run_ranks(_block, 1, recompute=False)
    (recomputed,) = run_ranks(_block, 1, recompute=True)
    for name, value in plain.items():
        assert torch.equal(value, recomputed[name]), name


@pytest.mark.quick
@pytest.mark.parametrize("build_spec", [decoder_layer_spec, vision_layer_spec])
def test_the_layer_class_is_the_callers(build_spec: Any) -> None:
    class Mine(TransformerLayer):
        pass

    assert build_spec(decoder_config(), backend="local", layer_class=Mine).module is Mine
    assert build_spec(decoder_config(), backend="local").module is TransformerLayer


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
def test_the_te_spec_leaves_the_q_and_k_norms_out_where_the_config_does() -> None:
    attention = vision_layer_spec(vision_config(), backend="te").submodules.self_attention
    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is IdentityOp


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
def test_a_mixture_under_te_keeps_its_norm_before_the_router() -> None:
    mixture = decoder_layer_spec(decoder_config(num_moe_experts=4), backend="te").submodules
    upstream = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=4).submodules
    assert mixture.pre_mlp_layernorm is upstream.pre_mlp_layernorm is not IdentityOp


@pytest.mark.quick
def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend is 'apex'; it must be 'te' or 'local'"):
        decoder_layer_spec(decoder_config(), backend="apex")  # type: ignore[arg-type]


@pytest.mark.quick
def test_te_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "HAVE_TE", False)
    with pytest.raises(ValueError, match="transformer_engine cannot be imported"):
        final_norm(decoder_config(), "te")
