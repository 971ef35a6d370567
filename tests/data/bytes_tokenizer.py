"""Tokenizers of Qwen's kind: of bytes, so that they have no unknown characters."""

import dataclasses

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loongplug.data.processor import Processor, SpecialTexts

CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL = (
    *(*CHAT, "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
# Tokens, but not special.
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)


def byte_level(special, *, added=(), merges=(), **options) -> PreTrainedTokenizerFast:
    """Any text by its bytes, some of which are merged, and ``special`` and other tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **options
    )


def with_bytes(processor: Processor, template: str | None = None) -> Processor:
    """The demo's processor with such a tokenizer, and its own chat template unless one is given."""
    merges = [("<", "|"), ("|", ">"), ("i", "m"), ("e", "n"), ("en", "d"), ("Ċ", "Ċ"), ("Ġ", "b")]
    template = template or processor.tokenizer.chat_template
    made = byte_level(SPECIAL, added=ADDED, merges=merges, chat_template=template)
    ids = {text: made.convert_tokens_to_ids(text) for text in SPECIAL}
    return dataclasses.replace(
        processor,
        tokenizer=made,
        special_texts=SpecialTexts.of(made, more=SPECIAL),
        token_ids={name: ids[text] for name, text in processor.tokens.items()},
        end_token_id=ids["<|im_end|>"],
    )
