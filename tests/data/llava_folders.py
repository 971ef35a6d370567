"""Folders of LLaVA's and InternVL's kind: tokenizers, image processors, chat templates."""

import json
from pathlib import Path
from typing import Any

from bytes_tokenizer import CHAT, byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

# As in llava-hf/llava-1.5-7b-hf: strings are passed over, images come first, answers stay open.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)

CLIP: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
SIGLIP: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessorFast",
    "size": {"height": 384, "width": 384},
}
PADDED: dict[str, Any] = {**CLIP, "image_processor_type": "LlavaImageProcessorPil", "do_pad": True}
TILES: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "processor_class": "InternVLProcessor",
    "size": {"height": 448, "width": 448},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
}
PATCH_14: dict[str, Any] = {"model_type": "llava", "vision_config": {"patch_size": 14}}
INTERNVL: dict[str, Any] = {
    "model_type": "internvl",
    "vision_config": {"patch_size": [14, 14]},
    "downsample_ratio": 0.5,
}

_TEXTS = [
    "USER: What is this? ASSISTANT: A cat on a mat. USER: And that?\nASSISTANT: Two herons, both.",
    "the cat sat on the mat and the dog sat on the log while we read 1 2 3 4 5 6 7 8 9 0 of them",
]


def llama_tokenizer(*, legacy: bool) -> PreTrainedTokenizerFast:
    """BPE that writes a space in front of a text; ``legacy``: also behind a special token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    specials = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(c) for c in range(33, 127)],
        show_progress=False,
    )
    # Word by word: no token of Llama's has a space behind a letter.
    tokenizer.train_from_iterator([word for text in _TEXTS for word in text.split()], trainer)
    tokenizer = Tokenizer.from_str(_without_special_bytes(tokenizer))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=LLAVA_TEMPLATE,
    )


def _without_special_bytes(tokenizer: Tokenizer) -> str:
    """Bytes are tokens of the model, and not added ones."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    return json.dumps(content)


def internvl_tokenizer() -> PreTrainedTokenizerFast:
    """Of Qwen's kind: bytes, no bos; it names the tokens around an image."""
    return byte_level(
        (*CHAT, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        chat_template=CHATML_TEMPLATE,
    )


def write_folder(folder, tokenizer, image_processor, *, model=None, **processor) -> Path:
    """``model`` is config.json's content, ``processor`` that of processor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    files = {
        "preprocessor_config.json": image_processor,
        "processor_config.json": processor,
        "config.json": model,
    }
    for name, content in files.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    return folder
