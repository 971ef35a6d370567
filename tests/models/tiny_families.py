"""Tiny models of every family, small but with every feature, each with a batch and what
transformers takes of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hf_batches import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    HEARS,
    IMAGE,
    TOKEN_IDS,
    VOCABULARY,
    Batch,
    Medium,
    Sound,
    Style,
    batch,
    plain_positions,
    timed_positions,
)
from hf_reference import media_arguments, qwen_arguments
from image_units import media_of

from loongplug.models.architecture import TextArchitecture, VisionLanguageArchitecture
from loongplug.models.audio_transformer import OmniAudioConfig, Qwen2AudioEncoderConfig
from loongplug.models.internvl import InternVLConfig
from loongplug.models.llava import LlavaConfig
from loongplug.models.patch_transformer import (
    ClipVisionConfig,
    InternVisionConfig,
    PatchTransformerConfig,
)
from loongplug.models.projectors import LinearConfig, MlpConfig, PixelShuffleConfig
from loongplug.models.qwen2_5_omni import OmniVisionConfig, Qwen25OmniConfig
from loongplug.models.qwen2_5_vl import (
    Qwen25DecoderConfig,
    Qwen25ProjectorConfig,
    Qwen25VisionConfig,
    Qwen25VLConfig,
)
from loongplug.models.qwen2_audio import Qwen2AudioConfig
from loongplug.models.qwen3_vl import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)
from loongplug.models.qwen3_vl_moe import Qwen3MoeDecoderConfig, Qwen3VLMoeConfig
from loongplug.models.text_decoders import LlamaTextConfig, Qwen2TextConfig

SP = {"tp": 2, "sequence_parallel": True}
# Sizes of decoders, which all have GQA.
_COMMON: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCABULARY,
}
TEXT: dict[str, Any] = _COMMON | {
    "ffn_hidden_size": 112,
    "kv_channels": 16,
    "rotary_base": 10_000.0,
    "max_position_embeddings": 512,
}
_QWEN3_TEXT: dict[str, Any] = _COMMON | {
    "ffn_hidden_size": 160,
    "kv_channels": 32,
    "mrope_section": (6, 5, 5),
}


def tied[ModelT: VisionLanguageArchitecture](model: ModelT) -> ModelT:
    """The model with one weight for embeddings and output."""
    return replace(model, foundation=replace(model.foundation, tie_word_embeddings=True))


@dataclass(frozen=True)
class Family:
    """A model, what makes its batch, and what transformers takes of that besides text."""

    model: Any
    data: Callable[[], Batch] = batch
    arguments: Callable[[Batch, torch.Tensor], dict[str, Any]] = qwen_arguments


# Qwen3-VL, with deepstack over three layers and an uneven mRoPE, and more experts than ranks.
QWEN3_VL = Qwen3VLConfig(
    image_encoder=Qwen3VisionConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_position_embeddings=64,
        deepstack_layers=(0, 1, 2),
    ),
    image_projector=Qwen3ProjectorConfig(),
    foundation=Qwen3DecoderConfig(**_QWEN3_TEXT),
    **TOKEN_IDS,
)
QWEN3_VL_MOE = Qwen3VLMoeConfig(
    image_encoder=QWEN3_VL.image_encoder,
    image_projector=QWEN3_VL.image_projector,
    foundation=Qwen3MoeDecoderConfig(
        **_QWEN3_TEXT, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=48
    ),
    **TOKEN_IDS,
)

# Qwen2.5-VL, with full and window attention: a window of 2 x 2 tokens is 4 x 4 patches.
QWEN2_5_VL = Qwen25VLConfig(
    image_encoder=Qwen25VisionConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        window_size=56,
        full_attention_layers=(1, 3),
    ),
    image_projector=Qwen25ProjectorConfig(),
    foundation=Qwen25DecoderConfig(
        **_COMMON
        | {
            "hidden_size": 80,
            "ffn_hidden_size": 160,
            "kv_channels": 20,
            "mrope_section": (2, 3, 5),
        },
    ),
    **TOKEN_IDS,
)
# The windows of these images and videos have ragged edges.
RAGGED = (
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((2, 6, 6), 1.5), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
    (),
    (Medium((3, 4, 6), 0.4),),
    (Medium((1, 6, 6)),),
    (Medium((1, 2, 2)), Medium((2, 6, 4), 2.0)),
)


def ragged() -> Batch:
    positions = timed_positions(QWEN2_5_VL.video_style())
    return batch(Style(patch_values=3 * 2 * 14 * 14, positions=positions), media=RAGGED)


# Models that take images of one size. Patches are of 2 x 2 pixels; LLaVA's images have 5 x 5 of
# them, InternVL's tiles 4 x 4, and an image has one or two tiles.
PATCH, SIDE = 2, 5
VISION: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": SIDE * PATCH,
}
CLIP = ClipVisionConfig(**VISION, feature_layer=-2)


def llava(
    encoder: PatchTransformerConfig = CLIP, decoder: TextArchitecture | None = None
) -> LlavaConfig:
    return LlavaConfig(
        image_encoder=encoder,
        image_projector=MlpConfig(),
        foundation=decoder or LlamaTextConfig(**TEXT),
        image_token_id=IMAGE,
    )


INTERNVL = InternVLConfig(
    image_encoder=InternVisionConfig(**VISION | {"image_size": 4 * PATCH}, spatial_merge_size=2),
    image_projector=PixelShuffleConfig(),
    foundation=Qwen2TextConfig(**TEXT),
    image_token_id=IMAGE,
)
PICTURE, TILE, TILES = (Medium((count, side, side)) for count, side in ((1, SIDE), (1, 4), (2, 4)))
PICTURES = ((PICTURE,), (), (), (PICTURE,), (PICTURE,), (), (PICTURE,), ())
TILED = ((TILES, TILE), (), (), (TILE,), (TILE, TILE), (), (TILES,), ())


def pictured(
    model: Any, media: tuple[tuple[Medium, ...], ...] = PICTURES, *, merge: int = 1
) -> Family:
    """A model that takes images of one size, ``merge`` x ``merge`` patches of which are a token."""
    style = Style(patch_values=3 * PATCH**2, merge=merge, marks=False, positions=plain_positions)
    return Family(
        model,
        lambda: batch(style, media=media),
        lambda data, ids: {"pixel_values": whole_images(data, merge=merge)},
    )


def whole_images(data: Batch, *, merge: int) -> torch.Tensor:
    """What transformers takes: whole images [images, 3, height, width], made of our patches."""
    vision = media_of(data.microbatch(0, len(data.samples)))
    frames, side, _ = vision.grids.sum(0)[0].item(), *vision.grids[0, 1:].tolist()
    images = torch.empty(frames, 3, side * PATCH, side * PATCH)
    patches = iter(vision.rows)
    for image in images:
        for block_row in range(0, side, merge):
            for block_column in range(0, side, merge):
                for row in range(block_row, block_row + merge):
                    for column in range(block_column, block_column + merge):
                        down, right = PATCH * row, PATCH * column
                        values = next(patches).view(3, PATCH, PATCH)
                        image[:, down : down + PATCH, right : right + PATCH] = values
    return images


# Models that hear. None to two sounds, of odd and even lengths, one that fills the window of 24
# frames, one of a single token.
HEARD = (
    (Sound(9), Sound(24)),
    (),
    (Sound(14),),
    (Sound(3), Sound(11)),
    (),
    (Sound(16),),
    (Sound(23),),
    (),
)
_EAR: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "mel_bins": 6,
    "max_positions": 12,
}
QWEN2_AUDIO = Qwen2AudioConfig(
    audio_encoder=Qwen2AudioEncoderConfig(**_EAR),
    audio_projector=LinearConfig(),
    foundation=Qwen2TextConfig(**TEXT),
    audio_token_id=AUDIO,
)


def hearing(model: Qwen2AudioConfig) -> Family:
    sizes = model.audio_encoder.sizes
    style = Style(sizes=sizes, marks=False, positions=plain_positions)
    return Family(
        model, lambda: batch(style, media=HEARD), lambda data, ids: feature_arguments(data, model)
    )


def feature_arguments(data: Batch, model: Any) -> dict[str, torch.Tensor]:
    """What transformers takes of the batch's sounds.

    Behind a sound stand the rows that the model looks at, then some that it must not look at.
    """
    sizes = model.audio_encoder.sizes
    sounds = data.microbatch(0, len(data.samples)).units[HEARS].media
    assert sounds is not None
    lengths = [sizes.frames((1, 1, count)) for count in sounds.grids[:, 2].tolist()]
    window = sizes.longest if sizes.behind else max(lengths)
    features = torch.full((len(lengths), window, sizes.mel_bins), 9.0)
    mask = torch.zeros(len(lengths), window, dtype=torch.int64)
    parts = sounds.rows.split(sounds.grids[:, 2].tolist())
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        features[number, : len(part)] = part[:window]
        mask[number, :length] = 1
    return {"input_features": features.transpose(1, 2), "feature_attention_mask": mask}


# Qwen2.5-Omni's thinker, which sees and hears at once: sounds are cut into chunks of 8 frames.
OMNI = Qwen25OmniConfig(
    image_encoder=OmniVisionConfig(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=2,
        patch_size=4,
        window_size=16,
        full_attention_layers=(1,),
        tokens_per_second=25,
    ),
    image_projector=Qwen25ProjectorConfig(),
    audio_encoder=OmniAudioConfig(**_EAR, n_window=4, output_dim=64),
    audio_projector=LinearConfig(),
    foundation=Qwen25DecoderConfig(
        **_COMMON, ffn_hidden_size=112, kv_channels=16, mrope_section=(2, 3, 3)
    ),
    **TOKEN_IDS,
    audio_token_id=AUDIO,
    audio_start_token_id=AUDIO_START,
    audio_end_token_id=AUDIO_END,
)
# Both, either and neither, of odd lengths, in either order.
SEEN_AND_HEARD = (
    (Medium((1, 2, 2)), Sound(19)),
    (),
    (Medium((2, 2, 4), 0.08), Sound(8)),
    (Sound(3), Medium((1, 4, 2)), Sound(12)),
    (Sound(17),),
    (Medium((1, 6, 4)),),
    (Sound(13), Medium((2, 2, 2), 0.12)),
    (),
)


def seen_and_heard() -> Batch:
    style = Style(
        patch_values=OMNI.image_encoder.row_values,
        sizes=OMNI.audio_encoder.sizes,
        positions=timed_positions(OMNI.video_style(), after_times=True),
    )
    return batch(style, media=SEEN_AND_HEARD)


def omni_arguments(data: Batch, ids: torch.Tensor) -> dict[str, Any]:
    of_seen = media_arguments(data)
    of_seen["video_second_per_grid"] = of_seen.pop("second_per_grid_ts")
    return of_seen | feature_arguments(data, OMNI)


FAMILIES = {
    "qwen3_vl": Family(QWEN3_VL),
    "qwen3_vl_moe": Family(QWEN3_VL_MOE),
    "qwen2_5_vl": Family(QWEN2_5_VL, ragged),
    "llava": pictured(llava()),
    "internvl": pictured(INTERNVL, TILED, merge=2),
    "qwen2_audio": hearing(QWEN2_AUDIO),
    "qwen2_5_omni": Family(OMNI, seen_and_heard, omni_arguments),
}
