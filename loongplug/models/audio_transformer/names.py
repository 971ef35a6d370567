"""What the files of each kind of tower call its tensors, behind the tower's root."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AudioNames:
    """One kind's names; None stands for what it does not have.

    To names without it ``.weight`` and ``.bias`` are added. The fields from ``layer`` on are those
    of :class:`loongplug.models.hf_encoder_rows.LayerNames`; the keys have no bias in any kind.
    """

    positions: str | None = None  # whole; without it, positions are computed
    final_norm: str
    layer: str = "layers.{}."
    norms: tuple[str, str] = ("self_attn_layer_norm", "final_layer_norm")
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    proj: str = "self_attn.out_proj"
    mlp: tuple[str, str] = ("fc1", "fc2")


WHISPER = AudioNames(positions="embed_positions.weight", final_norm="layer_norm")
OMNI = AudioNames(final_norm="ln_post")
