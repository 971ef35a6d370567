"""Architecture of a patch transformer. YAML files fill these dataclasses, one for each kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from loongplug.models.architecture import SquareVisionArchitecture
from loongplug.models.patch_transformer.names import CLIP, DINOV2, INTERN, SIGLIP, TowerNames

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PatchTransformerConfig(SquareVisionArchitecture):
    """A ViT over square images of one size, with a learned table of positions.

    ``names``, fixed for a kind, says what it has and what the files call that. ``final_norm``: the
    feature layer's output goes through the norm behind the last layer.
    """

    names: ClassVar[TowerNames]
    activation: str = "gelu"  # quick_gelu, gelu or gelu_pytorch_tanh
    final_norm: bool = False

    def has_class_token(self) -> bool:
        """As its kind."""
        return self.names.class_token is not None

    @property
    def norms_features(self) -> bool:
        """Whether the features go through the final norm."""
        return self.final_norm and self.computed_layers == self.num_layers

    def start_of_layer_scale(self) -> float | None:
        """What the layers' outputs are multiplied by at the start; None without layer scale."""
        return None

    def other_tensors(self) -> Mapping[str, Shape]:
        """What the files have besides embeddings, layers and their norms, and nothing here runs."""
        return {}

    def has_final_norm(self) -> bool:
        """Whether the files have a norm behind the last layer."""
        return True


@dataclass(frozen=True, kw_only=True)
class ClipVisionConfig(PatchTransformerConfig):
    """CLIP's: a class token, a norm before the layers too."""

    names: ClassVar[TowerNames] = CLIP
    activation: str = "quick_gelu"
    layernorm_epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig(PatchTransformerConfig):
    """SigLIP's and fixed-size SigLIP 2's: patches only. ``head``: the files have the pooling."""

    names: ClassVar[TowerNames] = SIGLIP
    activation: str = "gelu_pytorch_tanh"
    head: bool = True

    def other_tensors(self) -> Mapping[str, Shape]:
        """The attention pooling's."""
        if not self.head:
            return {}
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        return {
            "head.probe": (1, 1, hidden),
            "head.attention.in_proj_weight": (3 * hidden, hidden),
            "head.attention.in_proj_bias": (3 * hidden,),
            "head.attention.out_proj.weight": (hidden, hidden),
            "head.attention.out_proj.bias": (hidden,),
            "head.layernorm.weight": (hidden,),
            "head.layernorm.bias": (hidden,),
            "head.mlp.fc1.weight": (ffn, hidden),
            "head.mlp.fc1.bias": (ffn,),
            "head.mlp.fc2.weight": (hidden, ffn),
            "head.mlp.fc2.bias": (hidden,),
        }


@dataclass(frozen=True, kw_only=True)
class Dinov2VisionConfig(PatchTransformerConfig):
    """DINOv2's without SwiGLU: a class token and layer scale, which starts at ``layer_scale``."""

    names: ClassVar[TowerNames] = DINOV2
    layer_scale: float = 1.0
    mask_token: bool = True  # the files have it

    def start_of_layer_scale(self) -> float | None:
        """Its ``layer_scale``."""
        return self.layer_scale

    def other_tensors(self) -> Mapping[str, Shape]:
        """The token that stood for masked patches."""
        return {"embeddings.mask_token": (1, self.hidden_size)} if self.mask_token else {}


@dataclass(frozen=True, kw_only=True)
class InternVisionConfig(PatchTransformerConfig):
    """InternViT-300M as InternVL has it: a class token and layer scale, from ``layer_scale``.

    Its files have a final norm exactly where it is used: with ``final_norm``.
    """

    names: ClassVar[TowerNames] = INTERN
    patch_size: int = 14
    image_size: int = 448
    spatial_merge_size: int = 2
    layer_scale: float = 0.1
    mask_token: bool = False  # the files have it

    def start_of_layer_scale(self) -> float | None:
        """Its ``layer_scale``."""
        return self.layer_scale

    def other_tensors(self) -> Mapping[str, Shape]:
        """The token that stood for masked patches."""
        return {"embeddings.mask_token": (1, 1, self.hidden_size)} if self.mask_token else {}

    def has_final_norm(self) -> bool:
        """With ``final_norm`` only."""
        return self.final_norm
