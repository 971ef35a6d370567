"""The demo's processor folders for models that hear, as transformers 5 writes such folders."""

from pathlib import Path

from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from loongplug.data.audio_sizes import HOP, SAMPLE_RATE
from loongplug.data.demo_processor import (
    CHAT_TEMPLATE,
    IMAGE_PIXELS,
    PATCHES,
    ROLES,
    UNKNOWN,
    word_tokenizer,
)
from loongplug.data.demo_tasks import MEL_BINS, SECONDS, sound_task_texts

_AUDIO_SPECIAL_TOKENS = (  # of Qwen2-Audio's kind
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
)
_OMNI_NAMES = {  # of Qwen2.5-Omni's kind
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_OMNI_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_OMNI_NAMES.values())

# Sounds have numbers, which go on from message to message, and a line of their own.
_AUDIO_TEMPLATE = """\
{%- set sounds = namespace(count=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' -%}
{%- set sounds.count = sounds.count + 1 -%}
{{- 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_VIDEO_PART = "{%- elif part.type == 'video' -%}"
_AUDIO_PART = """\
{%- elif part.type == 'audio' -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
"""
_OMNI_TEMPLATE = (
    CHAT_TEMPLATE.replace("<|vision_start|>", "<|vision_bos|>")
    .replace("<|vision_end|>", "<|vision_eos|>")
    .replace("<|image_pad|>", "<|IMAGE|>")
    .replace("<|video_pad|>", "<|VIDEO|>")
    .replace(_VIDEO_PART, _AUDIO_PART + _VIDEO_PART)
)


def write_audio_processor(
    folder: Path, *, mel_bins: int = MEL_BINS, seconds: int = SECONDS
) -> None:
    """Write tokenizer, chat template and feature extractor of Qwen2-Audio's kind."""
    texts = (*sound_task_texts(), "Audio")
    tokenizer = _wrapped(word_tokenizer(_AUDIO_SPECIAL_TOKENS, ROLES, more_texts=texts))
    Qwen2AudioProcessor(
        feature_extractor=_feature_extractor(mel_bins, seconds),
        tokenizer=tokenizer,
        chat_template=_AUDIO_TEMPLATE,
    ).save_pretrained(str(folder))


def write_omni_processor(folder: Path, *, mel_bins: int = MEL_BINS, seconds: int = SECONDS) -> None:
    """Write tokenizer, chat template and processors of Qwen2.5-Omni's kind."""
    tokenizer = _wrapped(
        word_tokenizer(_OMNI_SPECIAL_TOKENS, ROLES, more_texts=sound_task_texts()), _OMNI_NAMES
    )
    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=IMAGE_PIXELS, **PATCHES),
        video_processor=Qwen2VLVideoProcessor(size=IMAGE_PIXELS, **PATCHES),
        feature_extractor=_feature_extractor(mel_bins, seconds),
        tokenizer=tokenizer,
        chat_template=_OMNI_TEMPLATE,
    ).save_pretrained(str(folder))


def _feature_extractor(mel_bins: int, seconds: int) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(
        feature_size=mel_bins,
        sampling_rate=SAMPLE_RATE,
        hop_length=HOP,
        chunk_length=seconds,
        return_attention_mask=True,
    )


def _wrapped(tokenizer: Tokenizer, names: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        model_max_length=32_768,
        extra_special_tokens=names or {},
    )
