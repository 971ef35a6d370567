"""The shared rope table against Megatron's own rotation."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from loongplug.models.layers.attention import rotate
from loongplug.models.layers.inputs import rope_table


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
