"""The demo's tokenizer, chat template and image processor, as a Hugging Face folder.

The tokenizer knows the words of the demo's questions and falls back to single characters for
any other; it loses nothing but characters outside its alphabet.
"""

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from loongplug.data.demo_tasks import task_texts
from loongplug.data.folder_files import COMBINED_FILE, IMAGE_FILE, VIDEO_FILE
from loongplug.data.video import TIMESTAMPS, VideoStyle

VOCAB_SIZE = 128  # the tokenizer fills less; the demo's model pads to this

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TILE_SPECIAL_TOKENS = (  # of InternVL's kind
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
)
_PLAIN_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<image>")  # of LLaVA's kind
UNKNOWN = "<|unknown|>"
_SPACE = "\u2581"  # how a space is written at the beginning of a word
_ALPHABET = "\n" + _SPACE + string.digits + string.ascii_letters + ".,:?!'-+="
ROLES = ("system", "user", "assistant")
_PLAIN_ROLES = ("USER", _SPACE + "USER", _SPACE + "ASSISTANT")
_TIMESTAMPS = ("<", ">", _SPACE + "seconds")  # of a video's frames
_WORD, _CHARACTER = -1.0, -10.0  # log probabilities: one word beats its characters

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
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

# What stands around an image's tokens, InternVL's processor writes.
_TILE_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\\n"
).replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>\\n")

# Answers end without a token, as in LLaVA's folders, and images stand before the text.
_PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{- message.role | upper + ': ' -}}
{%- if message.content is string -%}
{{- message.content + ' ' -}}
{%- else -%}
{%- for part in message.content if part.type == 'image' -%}
{{- '<image>\\n' -}}
{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}
{{- part.text + ' ' -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'ASSISTANT:' -}}
{%- endif -%}
"""

IMAGE_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
PATCHES: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": IMAGE_PIXELS,
    **PATCHES,
}
_VIDEO_PROCESSOR: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 512 * 512},  # of all frames
    **PATCHES,
}
_BLOCK_VIDEO_PROCESSOR: dict[str, Any] = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "size": IMAGE_PIXELS,  # of each frame
    **PATCHES,
}


@dataclass(frozen=True, kw_only=True)
class FixedImages:
    """Images that all become one size: their sides, and those of a patch, in pixels.

    Where blocks of patches are merged into a token, the folder is of InternVL's kind: a wide or
    high image becomes two tiles, and one of the whole.
    """

    side: int = 32  # a digit of the demo is legible at half of it
    patch_size: int = 8
    merge: int = 1  # side of a token in patches


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer with its chat template; the same ids every time."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(_SPECIAL_TOKENS, ROLES),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=32_768,
    )


def build_plain_tokenizer() -> PreTrainedTokenizerFast:
    """One of LLaVA's kind: it begins each text with ``<s>``, and knows images by ``<image>``."""
    tokenizer = word_tokenizer(_PLAIN_SPECIAL_TOKENS, _PLAIN_ROLES)
    begins = ("<s>", _PLAIN_SPECIAL_TOKENS.index("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begins]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token=UNKNOWN,
        chat_template=_PLAIN_TEMPLATE,
        model_max_length=32_768,
    )


def build_tile_tokenizer() -> PreTrainedTokenizerFast:
    """One of InternVL's kind: it names the tokens of an image, and those around them."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(_TILE_SPECIAL_TOKENS, ROLES),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        chat_template=_TILE_TEMPLATE,
        model_max_length=32_768,
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


def word_tokenizer(
    special: Sequence[str], roles: Sequence[str], *, more_texts: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer that knows these special tokens, the questions' words and ``more_texts``'."""
    words = _words((*task_texts(), *more_texts))
    vocab = [(token, 0.0) for token in (*special, UNKNOWN)]
    vocab += [(character, _CHARACTER) for character in _ALPHABET]
    vocab += [(word, _WORD) for word in (*roles, *words, *_TIMESTAMPS)]
    assert len(vocab) <= VOCAB_SIZE
    assert len({token for token, _ in vocab}) == len(vocab)
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=len(special)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\n0-9]"), "isolated"),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="never")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def write_processor(
    folder: Path, *, video_style: VideoStyle = TIMESTAMPS, fixed: FixedImages | None = None
) -> None:
    """Write tokenizer, chat template, image and video processor into ``folder``.

    ``video_style`` is that of the model family that the folder is for. With ``fixed``, the folder
    is for a family of LLaVA's or InternVL's kind instead, which has images of one size and no
    videos. One of InternVL's kind does not say how large patches are: the model does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fixed is not None:
        plain = fixed.merge == 1
        tokenizer = build_plain_tokenizer() if plain else build_tile_tokenizer()
        tokenizer.save_pretrained(str(folder))
        files = _fixed_files(fixed) if plain else _tile_files(fixed)
    else:
        build_tokenizer().save_pretrained(str(folder))
        video_processor = _VIDEO_PROCESSOR if video_style.timestamps else _BLOCK_VIDEO_PROCESSOR
        image_processor = _IMAGE_PROCESSOR | {"processor_class": video_processor["processor_class"]}
        files = {IMAGE_FILE: image_processor, VIDEO_FILE: video_processor}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fixed_files(fixed: FixedImages) -> dict[str, dict[str, Any]]:
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"height": fixed.side, "width": fixed.side},
        "do_center_crop": False,
        "image_mean": PATCHES["image_mean"],
        "image_std": PATCHES["image_std"],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": fixed.patch_size,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    return {IMAGE_FILE: image_processor, COMBINED_FILE: processor}


def _tile_files(fixed: FixedImages) -> dict[str, dict[str, Any]]:
    image_processor = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "processor_class": "InternVLProcessor",
        "size": {"height": fixed.side, "width": fixed.side},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 2,
        "image_mean": PATCHES["image_mean"],
        "image_std": PATCHES["image_std"],
    }
    processor = {
        "processor_class": "InternVLProcessor",
        "image_seq_length": (fixed.side // (fixed.patch_size * fixed.merge)) ** 2,
    }
    return {IMAGE_FILE: image_processor, COMBINED_FILE: processor}


def _words(texts: Sequence[str]) -> list[str]:
    """Words of more than one letter in the texts, with the space before them, sorted."""
    found = {
        word.replace(" ", _SPACE) for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)
    }
    return sorted(found)
