"""The shared rope table against Megatron's own rotation."""

from typing import Any

import pytest
import torch
from layer_configs import decoder_config, vision_config
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers.packed import pack_segments
from loongplug.models.layers.rope import rope_table, rotate
from loongplug.models.layers.specs import decoder_layer_spec, vision_layer_spec


def angles_and_heads(batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(6, batch, 1, 4, generator=generator) * 3
    heads = torch.randn(6, 3, 2, 8, generator=generator).to(dtype)
    return angles, heads.requires_grad_()


@pytest.mark.quick
@pytest.mark.parametrize("batch", [1, 3])
def test_rotation_and_gradient_are_megatrons(batch: int) -> None:
    angles, heads = angles_and_heads(batch)
    ours = rotate(heads, rope_table(angles, dtype=torch.float32))
    theirs = _apply_rotary_pos_emb_bshd(heads, torch.cat((angles, angles), dim=-1))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    weights = torch.randn(ours.shape)
    torch.testing.assert_close(
        torch.autograd.grad(ours, heads, weights),
        torch.autograd.grad(theirs, heads, weights),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.quick
def test_a_float32_table_turns_bfloat16_heads_in_float32() -> None:
    angles, heads = angles_and_heads(1, torch.bfloat16)
    ours = rotate(heads, rope_table(angles, dtype=torch.float32))
    assert ours.dtype == torch.bfloat16
    wide = heads.detach().float()
    theirs = _apply_rotary_pos_emb_bshd(wide, torch.cat((angles, angles), dim=-1))
    assert torch.equal(ours, theirs.bfloat16())
    ours.sum().backward()
    assert heads.grad is not None
    assert heads.grad.dtype == torch.bfloat16


@pytest.mark.quick
def test_a_table_for_another_head_size_is_refused() -> None:
    angles, heads = angles_and_heads(1)
    with pytest.raises(ValueError, match=r"width 12 met heads of 8 channels; it must be 16 wide"):
        rotate(heads, rope_table(angles[..., :3], dtype=torch.float32))


def _self_attention(rank: int, *, packed: bool) -> None:
    with model_parallel():
        if packed:
            config = vision_config()
            spec = vision_layer_spec(config, backend="local").submodules.self_attention
            params, s, b = pack_segments([4, 2, 4], device="cpu"), 10, 1
        else:
            config = decoder_config()
            spec = decoder_layer_spec(config, backend="local").submodules.self_attention
            params, s, b = None, 6, 3
        upstream = ModuleSpec(SelfAttention, params=spec.params, submodules=spec.submodules)
        ours, theirs = (build_module(x, config=config, layer_number=1) for x in (spec, upstream))
        theirs.load_state_dict(ours.state_dict())
        angles = torch.randn(s, b, 1, 4) * 3
        x = torch.randn(s, b, config.hidden_size, requires_grad=True)

        def results(attention: SelfAttention, rotary: Tensor) -> list[Any]:
            output, _ = attention(x, None, rotary_pos_emb=rotary, packed_seq_params=params)
            weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
            return [
                output,
                *torch.autograd.grad((output * weights).sum(), [x, *attention.parameters()]),
            ]

        table = rope_table(angles, dtype=torch.float32)
        expected = results(theirs, torch.cat((angles, angles), dim=-1))
        for a, b_ in zip(results(ours, table), expected, strict=True):
            assert (a - b_).abs().max() <= 2e-6 * b_.abs().max()


@pytest.mark.parametrize("packed", [False, True])
def test_self_attention_with_a_table_is_upstreams_with_angles(packed: bool) -> None:
    run_ranks(_self_attention, 1, packed=packed)
