"""Rope, plain, interleaved and in sections, against transformers' own."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig
from transformers import Qwen2_5_VLConfig as HfConfig25
from transformers import Qwen3VLConfig as HfConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from loongplug.models.layers.attention import rotate
from loongplug.models.layers.inputs import MultimodalRotary, inverse_frequencies
from loongplug.models.rope_settings import (
    Llama3Scaling,
    RopeSettings,
    interleaved_axes,
    sectioned_axes,
)

pytestmark = pytest.mark.quick

SCALED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def assert_turned_alike(reference, rope, position_ids, *, their_positions, section):
    """Heads turned by our table and by that of a model of transformers."""
    query = torch.randn(2, 4, 7, rope.channels)  # [b, heads, s, dim]
    cos, sin = reference(query, their_positions)
    expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    rotary = MultimodalRotary(rope, dtype=torch.float32)
    turned = rotate(query.permute(2, 0, 1, 3), rotary(position_ids, list(section)))
    torch.testing.assert_close(turned.permute(1, 2, 0, 3), expected, rtol=1e-5, atol=1e-5)


INTERLEAVED = (Qwen3VLTextRotaryEmbedding, interleaved_axes, {"mrope_interleaved": True})
IN_SECTIONS = (Qwen2_5_VLRotaryEmbedding, sectioned_axes, {})


@pytest.mark.parametrize(
    ("text", "kind", "kv_channels", "section"),
    [
        (HfConfig().text_config, INTERLEAVED, 32, (6, 5, 5)),
        (HfConfig().text_config, INTERLEAVED, 128, (24, 20, 20)),
        (HfConfig().text_config, INTERLEAVED, 16, (8, 0, 0)),
        (HfConfig25().text_config, IN_SECTIONS, 32, (4, 6, 6)),
        (HfConfig25().text_config, IN_SECTIONS, 128, (16, 24, 24)),
        (HfConfig25().text_config, IN_SECTIONS, 16, (1, 4, 3)),
    ],
)
def test_rotation_is_that_of_transformers(text, kind, kv_channels, section):
    reference, axes, more = kind
    text.head_dim = kv_channels
    text.hidden_size = kv_channels * text.num_attention_heads
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(section)}
    text.rope_parameters = rope | more
    settings = RopeSettings(channels=kv_channels, base=5e6, axes=axes(section))
    position_ids = torch.randint(0, 3000, (3, 2, 7))
    assert_turned_alike(
        reference(text), settings, position_ids, their_positions=position_ids, section=section
    )


def test_sections_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"sums to 15, expected kv_channels / 2 = 16"):
        MultimodalRotary(
            RopeSettings(channels=32, base=1e4, axes=interleaved_axes((5, 5, 5))),
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("channels", "base", "numbers"),
    [
        (128, 5e5, (8.0, 1.0, 4.0, 8192)),  # Llama 3.1
        (64, 5e5, (32.0, 1.0, 4.0, 8192)),  # Llama 3.2
        (10, 1e4, (8.0, 1.0, 4.0, 64)),
        (30, 1e4, (1.5, 0.25, 7.0, 100)),
        (128, 1e4, None),
        (10, 5e5, None),
    ],
)
def test_plain_rope_is_llama_s(channels, base, numbers):
    scaling = None if numbers is None else Llama3Scaling(**dict(zip(SCALED, numbers, strict=True)))
    kind = "default" if scaling is None else "llama3"
    llama = LlamaConfig(
        hidden_size=2 * channels,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": base}
        | ({} if scaling is None else vars(scaling)),
    )
    reference = LlamaRotaryEmbedding(llama)
    rope = RopeSettings(
        channels=channels, base=base, axes=sectioned_axes((channels // 2, 0, 0)), scaling=scaling
    )
    inverse = inverse_frequencies(rope)
    assert torch.equal(inverse, reference.inv_freq)  # to the bit, for positions are large
    if scaling is not None:
        ratio = inverse / inverse_frequencies(dataclasses.replace(rope, scaling=None))
        divided = torch.isclose(ratio, torch.tensor(1 / scaling.factor))
        assert (ratio == 1).any()
        assert divided.any()
        assert ((ratio != 1) & ~divided).any()  # and some are between the two
    position_ids = torch.randint(0, 100_000, (3, 2, 7))  # of which the first row counts
    assert_turned_alike(reference, rope, position_ids, their_positions=position_ids[0], section=())
