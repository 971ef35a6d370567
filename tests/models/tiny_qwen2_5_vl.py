"""A tiny Qwen2.5-VL for the tests of the family."""

from hf_batches import TOKEN_IDS, Batch, Medium, Style, batch, timed_positions

from loongplug.models.qwen2_5_vl.config import (
    Qwen25DecoderConfig,
    Qwen25ProjectorConfig,
    Qwen25VisionConfig,
    Qwen25VLConfig,
)

MEDIA = (  # a window is 4 x 4 patches
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((2, 6, 6), 1.5), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
    (),
    (Medium((3, 4, 6), 0.4),),
    (Medium((1, 6, 6)),),
    (Medium((1, 2, 2)), Medium((2, 6, 4), 2.0)),
)


def tiny_config(*, tied: bool) -> Qwen25VLConfig:
    """Small, but with every feature: GQA, full and window attention, an uneven mRoPE.

    Windows of 2 x 2 tokens are 4 x 4 patches.
    """
    return Qwen25VLConfig(
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
            num_layers=4,
            hidden_size=80,
            ffn_hidden_size=160,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=20,
            vocab_size=128,
            mrope_section=(2, 3, 5),
            tie_word_embeddings=tied,
        ),
        **TOKEN_IDS,
    )


def tiny_batch() -> Batch:
    """Images and videos whose windows have ragged edges."""
    positions = timed_positions(tiny_config(tied=False).video_style())
    style = Style(patch_values=3 * 2 * 14 * 14, frames_apart=False, positions=positions)
    return batch(style, media=MEDIA)
