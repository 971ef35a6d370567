"""Folders of tiny processors, a kind for each family: tokenizer, chat template, what makes pixels.

Tokenizers know single characters, and words that they are given.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from loongplug.data.folder_files import COMBINED_FILE, IMAGE_FILE, VIDEO_FILE
from loongplug.data.media_sizes import HOP, SAMPLE_RATE

Kind = Literal["qwen3_vl", "qwen2_5_vl", "llava", "internvl", "qwen2_audio", "qwen2_5_omni"]

VOCAB_SIZE = 128  # the tokenizer fills less; the models of configs/models/*/*_tiny.yaml pad to this
MEL_BINS = 32  # of sounds; the published models have 128
SECONDS = 4  # of the longest sound

_UNKNOWN = "<|unknown|>"
_SPACE = "\u2581"  # how a space is written at the beginning of a word
_ALPHABET = "\n" + _SPACE + string.digits + string.ascii_letters + ".,:?!'-+="
_TIMESTAMPS = ("<", ">", _SPACE + "seconds")  # of a video's frames
_WORD, _CHARACTER = -1.0, -10.0  # log probabilities: one word beats its characters
_CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# ``marks`` are what stands for each medium. The numbers of sounds go on from message to message.
_CHAT = """\
{%- set sounds = namespace(count=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- set text = [{'type': 'text', 'text': message.content}] -%}
{%- for part in (text if message.content is string else message.content) -%}
{%- set sounds.count = sounds.count + (1 if part.type == 'audio' else 0) -%}
{%- set mark = marks[part.type] if part.type in marks else part.text -%}
{{- mark | replace('NUMBER', sounds.count) if part.type == 'audio' else mark -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

# Answers end without a token, as in LLaVA's folders, and images stand before the text.
_PLAIN = """\
{%- for message in messages -%}
{{- message.role | upper + ': ' -}}
{%- set text = [{'type': 'text', 'text': message.content}] -%}
{%- set parts = text if message.content is string else message.content -%}
{%- for part in parts | sort(attribute='type') -%}
{{- '<image>\\n' if part.type == 'image' else part.text + ' ' -}}
{%- endfor -%}
{%- endfor -%}
{{- 'ASSISTANT:' if add_generation_prompt else '' -}}
"""


@dataclass(frozen=True, kw_only=True)
class FixedImages:
    """Images that all become one size: their sides, and those of a patch, in pixels.

    For InternVL's kind a wide or high image becomes two tiles of it, and one of the whole.
    """

    side: int = 32
    patch_size: int = 8


def _chat(**marks: str) -> str:
    """The chat template with what stands for each medium."""
    return f"{{%- set marks = {marks} -%}}\n{_CHAT}"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What the folders of a kind have of their own; ``tokens`` are the special ones, by id."""

    processor: str  # its class in transformers
    tokens: tuple[str, ...]
    template: str
    roles: tuple[str, ...] = ("system", "user", "assistant")
    ends: tuple[str, str] = ("<|im_end|>", "<|endoftext|>")  # an answer; and a padded row
    names: Mapping[str, str] | None = None  # by which transformers asks for special tokens


_TILES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_OMNI = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_QWEN3_VL = _Kind(
    processor="Qwen3VLProcessor",
    tokens=(*_CHAT_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    template=_chat(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
)
_KINDS: Mapping[Kind, _Kind] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen2_5_vl": replace(_QWEN3_VL, processor="Qwen2_5_VLProcessor"),
    "llava": _Kind(
        processor="LlavaProcessor",
        tokens=("<pad>", "<s>", "</s>", "<image>"),
        template=_PLAIN,
        roles=("USER", _SPACE + "USER", _SPACE + "ASSISTANT"),
        ends=("</s>", "<pad>"),
    ),
    "internvl": _Kind(  # what stands around an image's tokens, its processor writes
        processor="InternVLProcessor",
        tokens=(*_CHAT_TOKENS, *_TILES.values()),
        template=_chat(image="<IMG_CONTEXT>\n", video="<video>\n"),
        names=_TILES,
    ),
    "qwen2_audio": _Kind(
        processor="Qwen2AudioProcessor",
        tokens=(*_CHAT_TOKENS, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        template=_chat(audio="Audio NUMBER: <|audio_bos|><|AUDIO|><|audio_eos|>\n"),
    ),
    "qwen2_5_omni": _Kind(
        processor="Qwen2_5OmniProcessor",
        tokens=(*_CHAT_TOKENS, *_OMNI.values()),
        template=_chat(
            image="<|vision_bos|><|IMAGE|><|vision_eos|>",
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
            video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        ),
        names=_OMNI,
    ),
}

_MERGE = 2  # side of a token in patches, but for LLaVA's kind
_COLORS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": _MERGE, **_COLORS}
_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}  # of an image
_ALL_PIXELS = {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 512 * 512}  # of a video's frames
_SOUNDS = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MEL_BINS,
    "sampling_rate": SAMPLE_RATE,
    "hop_length": HOP,
    "chunk_length": SECONDS,
    "return_attention_mask": True,
}


def write_processor(
    folder: Path,
    kind: Kind = "qwen3_vl",
    *,
    words: Sequence[str] = (),
    fixed: FixedImages | None = None,
) -> None:
    """Write tokenizer, chat template and what prepares media into ``folder``.

    ``words`` are tokens besides the characters; one that follows a space begins with it. ``fixed``
    says how large the images of LLaVA's and InternVL's kind are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(kind, words=words).save_pretrained(str(folder))
    for name, content in _files(kind, fixed or FixedImages()).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build_tokenizer(
    kind: Kind = "qwen3_vl", *, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """The kind's tokenizer with its chat template; the same words, the same ids."""
    own = _KINDS[kind]
    written = sorted(word.replace(" ", _SPACE) for word in words)
    vocab = [(token, 0.0) for token in (*own.tokens, _UNKNOWN)]
    vocab += [(character, _CHARACTER) for character in _ALPHABET]
    vocab += [(word, _WORD) for word in (*own.roles, *written, *_TIMESTAMPS)]
    assert len({token for token, _ in vocab}) == len(vocab) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=len(own.tokens)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\n0-9]"), "isolated"),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="never")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in own.tokens]
    )
    named: dict[str, Any] = {} if own.names is None else {"extra_special_tokens": own.names}
    if "<s>" in own.tokens:  # each text begins with it
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", own.tokens.index("<s>"))]
        )
        named["bos_token"] = "<s>"
    end, padding = own.ends
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=padding,
        unk_token=_UNKNOWN,
        chat_template=own.template,
        model_max_length=32_768,
        **named,
    )


def _files(kind: Kind, fixed: FixedImages) -> dict[str, dict[str, Any]]:
    """The JSON files of a kind, as transformers reads them."""
    own = {"processor_class": _KINDS[kind].processor}
    square = {"size": {"height": fixed.side, "width": fixed.side}, **_COLORS}
    all_frames = {"size": _ALL_PIXELS if kind == "qwen3_vl" else _PIXELS, **_PATCHES}
    image = {"image_processor_type": "Qwen2VLImageProcessor", **own, "size": _PIXELS, **_PATCHES}
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **own, **all_frames}
    match kind:
        case "llava":
            image = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
            tokens = {"image_token": "<image>", "num_additional_image_tokens": 1}
            tokens |= {"patch_size": fixed.patch_size, "vision_feature_select_strategy": "default"}
            files = {IMAGE_FILE: image | square, COMBINED_FILE: tokens}
        case "internvl":
            tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 2}
            image = {"image_processor_type": "GotOcr2ImageProcessor", **tiles}
            count = (fixed.side // (fixed.patch_size * _MERGE)) ** 2
            files = {IMAGE_FILE: image | square, COMBINED_FILE: {"image_seq_length": count}}
        case "qwen2_audio":
            files = {COMBINED_FILE: {"feature_extractor": _SOUNDS}}
        case "qwen2_5_omni":
            seen = {"image_processor": image, "video_processor": video}
            files = {COMBINED_FILE: {**seen, "feature_extractor": _SOUNDS}}
        case _:
            if kind == "qwen3_vl":
                video["video_processor_type"] = "Qwen3VLVideoProcessor"
            files = {IMAGE_FILE: image, VIDEO_FILE: video}
    return {name: own | content for name, content in files.items()}
