"""Folders of models that hear, as transformers writes them and as they are published; sounds."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from bytes_tokenizer import CHAT, byte_level
from numpy.typing import NDArray
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
OMNI = ("<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>")
SECONDS = 2  # of the longest sound that these models take
MEL_BINS = 16
AUDIO_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder",
    "num_mel_bins": MEL_BINS,
    "max_source_positions": 50 * SECONDS,
}
OMNI_CONFIG: dict[str, Any] = {
    "thinker_config": {
        "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "num_mel_bins": MEL_BINS}
    }
}
OMNI_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif part.type == 'audio' -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""


def extractor(**settings: Any) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(
        **{
            "feature_size": MEL_BINS,
            "chunk_length": SECONDS,
            "return_attention_mask": True,
            **settings,
        }
    )


def qwen2_audio() -> Qwen2AudioProcessor:
    """Of transformers, with the chat template that it has."""
    return Qwen2AudioProcessor(extractor(), byte_level((*CHAT, *AUDIO)))


def write_qwen2_audio(folder: Path, *, published: bool = False) -> Path:
    """As transformers 5 writes it, or with a file for each part as on the hub."""
    theirs = qwen2_audio()
    if published:
        theirs.tokenizer.chat_template = theirs.chat_template
        theirs.tokenizer.save_pretrained(str(folder))
        theirs.feature_extractor.save_pretrained(str(folder))
        assert (folder / "preprocessor_config.json").is_file()
    else:
        theirs.save_pretrained(str(folder))
        assert "feature_extractor" in json.loads((folder / "processor_config.json").read_text())
        assert not (folder / "preprocessor_config.json").exists()
    (folder / "config.json").write_text(json.dumps({"audio_config": AUDIO_CONFIG}))
    return folder


def write_omni(folder: Path) -> Path:
    """Of Qwen2.5-Omni's kind: one file for images and sounds."""
    names = ("audio_token", "audio_bos_token", "audio_eos_token")
    names += ("image_token", "video_token", "vision_bos_token", "vision_eos_token")
    named = dict(zip(names, (*AUDIO, *OMNI), strict=True))
    special = (*CHAT, *AUDIO, *OMNI)
    tokenizer = byte_level(special, chat_template=OMNI_TEMPLATE, extra_special_tokens=named)
    tokenizer.save_pretrained(str(folder))
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 512 * 512},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    content = extractor().to_dict() | images
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(OMNI_CONFIG))
    return folder


def noise(samples: int, *, channels: int = 1, seed: int = 0) -> NDArray[np.float64]:
    """[samples, channels] within -0.5 and 0.5."""
    return np.random.RandomState(seed).uniform(-0.5, 0.5, (samples, channels))


def write_wav(
    path: Path, sound: NDArray[np.float64], *, rate: int = 16_000, width: int = 2
) -> NDArray[np.float64]:
    """Write [samples, channels] with so many bytes a number; gives what stands there."""
    full = 2 ** (8 * width - 1)
    numbers = np.round(sound * full).astype(np.int64)
    wide = ((numbers + 128) if width == 1 else numbers).astype("<i8")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(sound.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(wide.reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
    return numbers / full
