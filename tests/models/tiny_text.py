"""Tiny models with each of the decoders of text, behind an encoder that text leaves idle."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_batches import SEQ_LENGTH, TOKEN_IDS, Batch, Style, batch, qwen3_positions
from hf_reference import Step, reference_step
from safetensors.torch import load_file, save_file
from tiny_families import QWEN2_5_VL

from loongplug.models import text_decoders
from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_config import hf_config
from loongplug.models.registry import family_of
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.verify.weights import random_tensor

PACKAGE = "composed_text"
# One frequency of five stays, one is blended, three are divided.
SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# Sizes that all differ: heads times their channels is not the hidden size, nothing is a power of 2.
_COMMON: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 10,
    "hidden_size": 66,
    "ffn_hidden_size": 74,
    "vocab_size": 130,
    "rotary_base": 10_000.0,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 96,
}
DECODERS: dict[str, text_decoders.PlainTextConfig] = {
    "llama": text_decoders.LlamaTextConfig(**_COMMON, rope_scaling=SCALING),
    "llama-tied": text_decoders.LlamaTextConfig(
        **_COMMON | {"num_attention_heads": 3, "num_query_groups": 1, "rotary_base": 500.0},
        tie_word_embeddings=True,
    ),
    "mistral": text_decoders.MistralTextConfig(**_COMMON, sliding_window=SEQ_LENGTH),
    "qwen2": text_decoders.Qwen2TextConfig(**_COMMON | {"kv_channels": 11 * 2, "hidden_size": 62}),
    "qwen2-tied": text_decoders.Qwen2TextConfig(
        **_COMMON | {"num_attention_heads": 5, "num_query_groups": 5, "hidden_size": 50},
        tie_word_embeddings=True,
    ),
    "qwen3": text_decoders.Qwen3TextConfig(
        **_COMMON | {"num_query_groups": 3}, rope_scaling=SCALING
    ),
    "qwen3-tied": text_decoders.Qwen3TextConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3_moe": text_decoders.Qwen3MoeTextConfig(  # torch's grouped products want multiples of 4
        **_COMMON | {"hidden_size": 68},
        num_experts=6,
        experts_per_token=2,
        expert_ffn_hidden_size=28,
    ),
}


def with_decoder(text: text_decoders.PlainTextConfig) -> VisionLanguageArchitecture:
    """A whole model with the decoder; the package must be trusted."""
    classes = vars(importlib.import_module(f"{PACKAGE}.config"))
    name = type(text).__name__.removesuffix("TextConfig")
    model: VisionLanguageArchitecture = classes[f"Composed{name}Config"](
        image_encoder=QWEN2_5_VL.image_encoder,
        image_projector=QWEN2_5_VL.image_projector,
        foundation=text,
        **TOKEN_IDS,
    )
    return model


def described(model: VisionLanguageArchitecture) -> HuggingFaceModel:
    return family_of(model, trusted_packages=[PACKAGE]).load_hugging_face(model)


def write_reference(folder: Path, model: VisionLanguageArchitecture) -> tuple[Any, set[str]]:
    """transformers' decoder of text, and a folder of it with an encoder's weights beside it.

    Also the names of the tensors that transformers wrote.
    """
    ours = described(model)
    whole = hf_config(ours)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(whole.text_config).float()
    with torch.no_grad():
        for parameter in reference.parameters():  # nothing left at 0 or 1, where mistakes hide
            parameter.add_(torch.randn_like(parameter) * 0.05)
    reference.save_pretrained(folder)
    file = folder / "model.safetensors"
    text = load_file(file)
    encoder = {
        source.name: random_tensor(source, seed=0)
        for bundle in ours.mapping.bundles()
        for source in bundle.sources
        if not bundle.row.names[0].startswith("text_decoder.")
    }
    save_file(text | encoder, file, metadata={"format": "pt"})
    whole.save_pretrained(folder)
    return reference, set(text)


def step_of(reference: Any, given: Batch) -> Step:
    """In transformers; gradients by the names of parameters."""
    return reference_step(reference, given, arguments=lambda given, ids: {})


def data() -> Batch:
    """Text alone. Only the first axis of its positions counts; the others say something else."""
    style = Style(patch_values=3 * 2 * 14 * 14, positions=qwen3_positions)
    made = batch(style, media=((),) * 4)
    samples = []
    for sample in made.samples:
        positions = sample.position_ids.clone()
        positions[1:] = positions[1:].flip(-1)
        samples.append(dataclasses.replace(sample, position_ids=positions))
    return dataclasses.replace(made, samples=tuple(samples))
