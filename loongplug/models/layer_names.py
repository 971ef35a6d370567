"""What files call the tensors of an encoder's layers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """What the files of one kind of encoder call the tensors of one layer.

    ``.weight`` and ``.bias`` are added to the names. ``layer`` is how they begin behind the
    encoder's root, with ``{}`` for the layer's number; the others are behind it. ``qkv`` has three
    names, or one where queries, keys and values are one tensor.
    """

    layer: str
    norms: tuple[str, str]  # before attention, before the MLP
    qkv: tuple[str, ...]
    proj: str
    mlp: tuple[str, str]
