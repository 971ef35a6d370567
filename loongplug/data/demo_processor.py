"""The demo's tokenizer, chat template and image processor, as a Hugging Face folder.

The tokenizer knows the words of the demo's questions and falls back to single characters for
any other; it loses nothing but characters outside its alphabet.
"""

import json
import re
import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loongplug.data.demo_tasks import task_texts
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
_UNKNOWN = "<|unknown|>"
_SPACE = "\u2581"  # how a space is written at the beginning of a word
_ALPHABET = "\n" + _SPACE + string.digits + string.ascii_letters + ".,:?!'-+="
_ROLES = ("system", "user", "assistant")
_TIMESTAMPS = ("<", ">", _SPACE + "seconds")  # of a video's frames
_WORD, _CHARACTER = -1.0, -10.0  # log probabilities: one word beats its characters

_CHAT_TEMPLATE = """\
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

_PATCHES: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    **_PATCHES,
}
_VIDEO_PROCESSOR: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 512 * 512},  # of all frames
    **_PATCHES,
}
_BLOCK_VIDEO_PROCESSOR: dict[str, Any] = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},  # of each frame
    **_PATCHES,
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer with its chat template; the same ids every time."""
    vocab = [(token, 0.0) for token in (*_SPECIAL_TOKENS, _UNKNOWN)]
    vocab += [(character, _CHARACTER) for character in _ALPHABET]
    vocab += [(word, _WORD) for word in (*_words(), *_TIMESTAMPS)]
    assert len(vocab) <= VOCAB_SIZE
    assert len({token for token, _ in vocab}) == len(vocab)
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=len(_SPECIAL_TOKENS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\n0-9]"), "isolated"),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="never")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=_UNKNOWN,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=32_768,
    )


def write_processor(folder: Path, *, video_style: VideoStyle = TIMESTAMPS) -> None:
    """Write tokenizer, chat template, image and video processor into ``folder``.

    ``video_style`` is that of the model family that the folder is for.
    """
    video_processor = _VIDEO_PROCESSOR if video_style.timestamps else _BLOCK_VIDEO_PROCESSOR
    image_processor = _IMAGE_PROCESSOR | {"processor_class": video_processor["processor_class"]}
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(str(folder))
    for name, content in (
        ("preprocessor_config.json", image_processor),
        ("video_preprocessor_config.json", video_processor),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _words() -> list[str]:
    """Words of more than one letter in the questions, with the space before them, sorted."""
    found = {
        word.replace(" ", _SPACE)
        for text in task_texts()
        for word in re.findall(r" ?[A-Za-z]{2,}", text)
    }
    return [*_ROLES, *sorted(found)]
