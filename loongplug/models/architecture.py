"""Config classes that describe encoders, projectors, decoders and whole models; families derive."""

from collections import Counter
from dataclasses import dataclass, replace
from math import isqrt, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from loongplug.models.entries import Entry, Role
from loongplug.models.lora import LoraSettings
from loongplug.models.rope_settings import RopeSettings, Section, interleaved_axes, sectioned_axes

if TYPE_CHECKING:
    from loongplug.data.sample import Grid
    from loongplug.data.video import VideoStyle

# Sections of transformers' config.json, with the modules that each describes.
SECTIONS = MappingProxyType(
    {
        "text_config": ("text_decoder",),
        "vision_config": ("image_encoder", "image_projector"),
    }
)


@dataclass(frozen=True, kw_only=True)
class EncoderArchitecture:
    """A transformer over rows of media, before its projector.

    Fixed for a family: ``mlp_matrices`` are those of one layer; a gated MLP has three. Its layers
    have one state for so many ``rows_per_state``.
    """

    mlp_matrices: ClassVar[int] = 2
    rows_per_state: ClassVar[int] = 1
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    layernorm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    tensor_model_parallel_size: int | None = None  # None: the decoder's
    # Those of one with a rank_offset; else they follow from the decoder's.
    data_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    stage_layers: tuple[int, ...] | None = None  # of each stage; None: as even as can be
    rank_offset: int | None = None  # the first of its own ranks; None: it lies on the decoder's
    # How it is parallel, where not as the flags say.
    mode: Literal["uniform", "encoder_hetero_dp", "full_hetero_dp"] | None = None
    freeze: bool = False
    recompute: bool = False
    # Full separation encodes several microbatches' media in one pass up to so many rows of input.
    joined_rows: int = 16384
    lora: LoraSettings | None = None
    lr_mult: float = 1.0  # times --lr and --min-lr

    @property
    def computed_layers(self) -> int:
        """How many of its layers run; the others, behind them, only travel with the files."""
        return self.num_layers

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """How many of the layers that run each pipeline stage has."""
        if self.stage_layers is not None:
            return self.stage_layers
        each, more = divmod(self.computed_layers, self.pipeline_model_parallel_size)
        return tuple(each + (stage < more) for stage in range(self.pipeline_model_parallel_size))

    @property
    def row_values(self) -> int:
        """Numbers in one row of its input."""
        raise NotImplementedError

    def states(self, grid: "Grid") -> int:
        """How many states its layers have for a medium whose rows have this grid."""
        return prod(grid)

    def tokens(self, grid: "Grid") -> int:
        """How many tokens stand in the text for a medium whose rows have this grid."""
        raise NotImplementedError

    def blank_grid(self) -> "Grid":
        """The grid of the smallest medium, which is encoded in the place of none."""
        raise NotImplementedError

    def grid_of(self, tokens: int) -> "Grid":
        """The least grid with at least so many tokens, one or more, and of a usual shape."""
        raise NotImplementedError

    def attention_window(self, layer: int) -> int | None:
        """The side in rows of the windows that a layer attends within; None: whole frames."""
        return None

    def attention_windows(self) -> dict[int | None, int]:
        """How many layers attend within windows of which side, as :meth:`attention_window`."""
        return dict(Counter(map(self.attention_window, range(self.computed_layers))))

    def taps(self) -> tuple[int, ...]:
        """The 0-based layers whose output goes to the decoder as well, behind its first layers."""
        return ()


@dataclass(frozen=True, kw_only=True)
class VisionArchitecture(EncoderArchitecture):
    """A vision transformer over patches, before its projector.

    Fixed for a family: ``one_size`` says that all images have the same, its ``image_size``.
    """

    one_size: ClassVar[bool] = False
    patch_size: int
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3

    @property
    def row_values(self) -> int:
        """The values of one patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def tokens(self, grid: "Grid") -> int:
        """Tokens: one for each merge block."""
        return prod(grid) // self.spatial_merge_size**2

    def blank_grid(self) -> "Grid":
        """One merge block of one frame."""
        return 1, self.spatial_merge_size, self.spatial_merge_size

    def grid_of(self, tokens: int) -> "Grid":
        """An image as near to a square as whole sides allow."""
        merge = self.spatial_merge_size
        height = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
        return 1, height * merge, tokens // height * merge


@dataclass(frozen=True, kw_only=True)
class RotaryVisionArchitecture(VisionArchitecture):
    """A vision transformer whose queries and keys turn with a patch's row and column: 2D rope."""

    rotary_base: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class SquareVisionArchitecture(VisionArchitecture):
    """A vision transformer over square images of one size.

    ``feature_layer`` is the layer whose output the projector gets, counted as transformers counts
    hidden states: 0 is the embeddings, -1 the last layer; the layers behind it only travel from
    file to file.
    """

    one_size: ClassVar[bool] = True
    image_size: int  # pixels of a side
    temporal_patch_size: int = 1
    spatial_merge_size: int = 1  # side of the blocks of patches that the projector merges
    feature_layer: int = -1

    @property
    def side(self) -> int:
        """Patches in a row, and in a column; pixels that do not fill one are left out."""
        return self.image_size // self.patch_size

    def states(self, grid: "Grid") -> int:
        """States: one for each patch, and one for each image's class token."""
        images, *_ = grid
        return prod(grid) + images * self.has_class_token()

    @property
    def computed_layers(self) -> int:
        """The number of layers up to ``feature_layer``."""
        behind = self.num_layers + 1 if self.feature_layer < 0 else 0
        return self.feature_layer + behind

    def require_feature_layer(self) -> None:
        """Raise ValueError for a feature layer that the encoder does not have."""
        layers = self.num_layers
        if not 1 <= self.computed_layers <= layers:
            raise ValueError(
                f"feature_layer is {self.feature_layer} in an encoder of {layers} layers: it must "
                f"be within 1 and {layers}, or within {-layers} and -1."
            )

    def has_class_token(self) -> bool:
        """Whether an image has a state before those of its patches; the projector gets none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ProjectorArchitecture:
    """The patch merger; its sizes follow from its neighbours."""

    layernorm_epsilon: float = 1e-6
    freeze: bool = False
    lora: LoraSettings | None = None
    lr_mult: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TextArchitecture:
    """A text decoder with grouped-query attention, RMSNorm, SwiGLU and rope."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    rotary_base: float
    layernorm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    freeze: bool = False
    lora: LoraSettings | None = None
    lr_mult: float = 1.0

    def rope_section(self) -> Section:
        """How many pairs of a head's channels turn with time, height and width."""
        return (self.kv_channels // 2, 0, 0)

    def rope(self) -> RopeSettings:
        """How positions turn queries and keys."""
        return RopeSettings(
            channels=self.kv_channels,
            base=self.rotary_base,
            axes=sectioned_axes(self.rope_section()),
        )


@dataclass(frozen=True, kw_only=True)
class MultimodalTextArchitecture(TextArchitecture):
    """A text decoder with multimodal rope: images and videos have positions on three axes.

    ``interleaved_mrope``, fixed for a family, says whether the three axes alternate from channel
    to channel or have one stretch of channels each.
    """

    interleaved_mrope: ClassVar[bool]
    mrope_section: Section  # pairs of channels for time, height, width

    def rope_section(self) -> Section:
        """The section that the YAML gives."""
        return self.mrope_section

    def rope(self) -> RopeSettings:
        """The settings with the family's order of axes."""
        axes = interleaved_axes if self.interleaved_mrope else sectioned_axes
        return replace(super().rope(), axes=axes(self.mrope_section))


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How an encoder stands in a family: its projector's name, the media that it takes."""

    projector: str
    media: tuple[str, ...]


ModuleArchitecture = EncoderArchitecture | ProjectorArchitecture | TextArchitecture


@dataclass(frozen=True, kw_only=True)
class MultimodalArchitecture:
    """Encoders with their projectors, and a decoder; which encoders, families say.

    ``keys`` has, by a module's name in the built model, its key here and in the YAML;
    ``encoders``, by the name of an encoder's module, that of its projector and the kinds of media
    that it takes. ``plain_positions``, fixed for a family, says whether it counts tokens alone, or
    images' rows and columns as well.
    """

    plain_positions: ClassVar[bool] = False
    keys: ClassVar[dict[str, str]]
    encoders: ClassVar[dict[str, Encoding]]
    foundation: TextArchitecture

    @classmethod
    def entries(cls) -> tuple[Entry, ...]:
        """The modules with layouts of their own, in the order of parameters and optimizers."""
        (decoder,) = (name for name, key in cls.keys.items() if key == "foundation")
        encoders = [
            Entry(
                name=name,
                role=Role.ENCODER,
                media=each.media,
                beside=(each.projector,),
                into=decoder,
            )
            for name, each in cls.encoders.items()
        ]
        return (*encoders, Entry(name=decoder, role=Role.DECODER))

    def modules(self) -> dict[str, ModuleArchitecture]:
        """The architecture of each module, by its name in the built model."""
        return {name: getattr(self, key) for name, key in self.keys.items()}

    def encoder(self, name: str) -> EncoderArchitecture:
        """That of the encoder with this name."""
        return getattr(self, self.keys[name])

    def beside_the_decoder(self) -> Self:
        """The same model, whose encoders with ranks of their own lie on the decoder's."""
        colocated: dict[str, Any] = {
            "rank_offset": None,
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "stage_layers": None,
            "tensor_model_parallel_size": None,
        }
        changed: dict[str, Any] = {
            self.keys[name]: replace(encoder, **colocated)
            for name in self.encoders
            if (encoder := self.encoder(name)).rank_offset is not None
        }
        return replace(self, **changed)

    def taps(self) -> int:
        """How many features of a token the decoder adds behind its first layers, at most."""
        return max(len(self.encoder(name).taps()) for name in self.encoders)

    def video_style(self) -> "VideoStyle":
        """How the family tells the time in a video; the time as text, unless it says otherwise."""
        from loongplug.data.video import TIMESTAMPS

        return TIMESTAMPS


@dataclass(frozen=True, kw_only=True)
class VisionLanguageArchitecture(MultimodalArchitecture):
    """Encoder, projector and decoder, and the ids of the special tokens.

    A token id that is None is the tokenizer's; it is filled in before the model is built.
    """

    keys: ClassVar[dict[str, str]] = {
        "image_encoder": "image_encoder",
        "image_projector": "image_projector",
        "text_decoder": "foundation",
    }
    encoders: ClassVar[dict[str, Encoding]] = {
        "image_encoder": Encoding(projector="image_projector", media=("image", "video"))
    }
    image_encoder: VisionArchitecture
    image_projector: ProjectorArchitecture
    foundation: TextArchitecture
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
