"""What every vision-language model here is described by; families derive and add their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loongplug.models.entries import Entry, Role, checked
from loongplug.models.lora.settings import LoraSettings

if TYPE_CHECKING:
    from loongplug.data.video import VideoStyle

# The sections of transformers' config.json, with the modules that each describes.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "text_config": ("text_decoder",),
    "vision_config": ("image_encoder", "image_projector"),
}


@dataclass(frozen=True, kw_only=True)
class VisionArchitecture:
    """A vision transformer over patches with 2D rope, before its projector.

    ``mlp_matrices``, fixed for a family, are those of one layer; a gated MLP has three.
    """

    mlp_matrices: ClassVar[int] = 2
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    patch_size: int
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    layernorm_epsilon: float = 1e-6
    rotary_base: float = 10000.0
    initializer_range: float = 0.02
    tensor_model_parallel_size: int | None = None  # None: the decoder's
    freeze: bool = False
    recompute: bool = False
    lora: LoraSettings | None = None
    lr_mult: float = 1.0  # times --lr and --min-lr

    def attention_windows(self) -> dict[int | None, int]:
        """How many layers attend within windows of which side in patches; None: whole frames."""
        return {None: self.num_layers}

    def taps(self) -> tuple[int, ...]:
        """The 0-based layers whose output goes to the decoder as well, behind its first layers."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ProjectorArchitecture:
    """The patch merger; its sizes follow from its neighbours."""

    layernorm_epsilon: float = 1e-6
    freeze: bool = False
    lora: LoraSettings | None = None
    lr_mult: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TextArchitecture:
    """A text decoder with grouped-query attention, RMSNorm, SwiGLU and multimodal rope.

    ``interleaved_mrope``, fixed for a family, says whether the three axes alternate from channel
    to channel or have one stretch of channels each.
    """

    interleaved_mrope: ClassVar[bool]
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    mrope_section: tuple[int, int, int]  # pairs of channels for time, height, width
    rotary_base: float
    layernorm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    freeze: bool = False
    lora: LoraSettings | None = None
    lr_mult: float = 1.0


ModuleArchitecture = VisionArchitecture | ProjectorArchitecture | TextArchitecture


@dataclass(frozen=True, kw_only=True)
class VisionLanguageArchitecture:
    """Encoder, projector and decoder, and the ids of the special tokens.

    A token id that is None is the tokenizer's; it is filled in before the model is built.
    ``keys`` has, by a module's name in the built model, its key here and in the YAML.
    """

    keys: ClassVar[dict[str, str]] = {
        "image_encoder": "image_encoder",
        "image_projector": "image_projector",
        "text_decoder": "foundation",
    }
    image_encoder: VisionArchitecture
    image_projector: ProjectorArchitecture
    foundation: TextArchitecture
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    @classmethod
    def entries(cls) -> tuple[Entry, ...]:
        """The modules with layouts of their own, in the order of parameters and optimizers."""
        return checked(
            (
                Entry(
                    name="image_encoder",
                    role=Role.ENCODER,
                    media=("image", "video"),
                    beside=("image_projector",),
                    into="text_decoder",
                ),
                Entry(name="text_decoder", role=Role.DECODER),
            )
        )

    def modules(self) -> dict[str, ModuleArchitecture]:
        """The architecture of each module, by its name in the built model."""
        return {name: getattr(self, key) for name, key in self.keys.items()}

    @property
    def vision(self) -> VisionArchitecture:
        """The encoder of images and videos."""
        return self.image_encoder

    def video_style(self) -> "VideoStyle":
        """How the family tells the time in a video; the time as text, unless it says otherwise."""
        from loongplug.data.video import TIMESTAMPS

        return TIMESTAMPS
