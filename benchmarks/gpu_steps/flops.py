"""How many floating-point operations training on a sample takes, by the model's architecture.

A weight matrix takes 2 operations per element and token forward, and 4 backward where its module
is trained: 6 N per token before padding, 2 N per patch of a frozen encoder. Attention comes on
top: two products of queries with keys or values, half of them under a causal mask. Norms,
activations, embeddings' look-ups and the optimizer are left out, as is usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FORWARD, _TRAINED = 2, 6  # operations per element of a matrix


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Elements of all weight matrices that one token, or one patch, meets."""

    decoder: int  # of a token, with the output layer; of experts, those that it is sent to
    encoder: int  # of a patch
    projector: int  # of a merged token


def matrices_of(config: Any) -> Matrices:
    """Count them in the architecture of a vision-language model."""
    text, vision = config.foundation, config.image_encoder
    heads = text.num_attention_heads * text.kv_channels
    groups = text.num_query_groups * text.kv_channels
    attention = 2 * text.hidden_size * heads + 2 * text.hidden_size * groups
    layer = attention + _mlp(text)
    block = vision.hidden_size * vision.spatial_merge_size**2
    mergers = 1 + len(getattr(vision, "deepstack_layers", ()))
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    vision_layer = (
        4 * vision.hidden_size**2
        + vision.mlp_matrices * vision.hidden_size * vision.ffn_hidden_size
    )
    return Matrices(
        decoder=text.num_layers * layer + text.hidden_size * text.vocab_size,
        encoder=vision.num_layers * vision_layer + patch * vision.hidden_size,
        projector=mergers * block * (block + text.hidden_size),
    )


def _mlp(text: Any) -> int:
    """Gate, up and down of the MLP, or of a token's experts with the router."""
    experts: int | None = getattr(text, "num_experts", None)
    if experts is None:
        return 3 * int(text.hidden_size) * int(text.ffn_hidden_size)
    width = text.experts_per_token * text.expert_ffn_hidden_size
    width += text.shared_expert_ffn_hidden_size or 0
    return int(text.hidden_size) * (3 * int(width) + experts)


def sample_flops(config: Any, *, tokens: int, frames: Sequence[int]) -> int:
    """Of one sample: ``tokens`` before padding, media of ``frames`` with so many patches each.

    The decoder is trained, and the projector is where it is not frozen.
    """
    text, vision = config.foundation, config.image_encoder
    assert not text.freeze, "6 N per token is a trained decoder's"
    matrices = matrices_of(config)
    heads = text.num_attention_heads * text.kv_channels
    # Queries x keys and weights x values, 2 operations each, of half the pairs; 3 times in all.
    causal = 3 * 4 * tokens**2 * heads * text.num_layers // 2
    of_encoder = _FORWARD if vision.freeze else _TRAINED
    of_projector = _FORWARD if config.image_projector.freeze else _TRAINED
    patches = sum(frames)
    merged = patches // vision.spatial_merge_size**2
    attended = sum(
        layers * sum(each * (each if side is None else min(side**2, each)) for each in frames)
        for side, layers in vision.attention_windows().items()
    )
    full = of_encoder // _FORWARD * 4 * attended * vision.hidden_size
    return (
        _TRAINED * matrices.decoder * tokens
        + causal
        + of_encoder * matrices.encoder * patches
        + full
        + of_projector * matrices.projector * merged
    )
