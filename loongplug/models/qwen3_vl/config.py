"""Architecture of a Qwen3-VL model, module by module. YAML files fill these dataclasses."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig:
    """The ViT: 3D patch embedding, interpolated position table, 2D rope, LayerNorm, GELU MLP."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_position_embeddings: int  # a square number: the learned grid
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    deepstack_layers: tuple[int, ...] = ()  # 0-based layers whose output is tapped
    layernorm_epsilon: float = 1e-6
    rotary_base: float = 10000.0
    initializer_range: float = 0.02
    tensor_model_parallel_size: int | None = None  # None: the decoder's
    freeze: bool = False
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen3ProjectorConfig:
    """The patch merger and one deepstack merger per tapped layer; sizes follow its neighbours."""

    layernorm_epsilon: float = 1e-6
    freeze: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen3DecoderConfig:
    """The text decoder: GQA with q/k norm, RMSNorm, SwiGLU, interleaved mRoPE."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    mrope_section: tuple[int, int, int]  # pairs of channels for time, height, width
    rotary_base: float = 5_000_000.0
    layernorm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 262_144
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig:
    """A whole Qwen3-VL: encoder, projector, decoder, and the ids of its special tokens.

    A token id that is None is the tokenizer's; it is filled in before the model is built.
    """

    image_encoder: Qwen3VisionConfig
    image_projector: Qwen3ProjectorConfig
    foundation: Qwen3DecoderConfig
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    def visual_token_ids(self) -> tuple[int, int]:
        """The ids of the image and the video placeholder, known once a tokenizer was read."""
        assert self.image_token_id is not None
        assert self.video_token_id is not None
        return self.image_token_id, self.video_token_id
