"""Small models with random weights, whose answers are noise but hang on what they are asked."""

from pathlib import Path

import torch
import transformers

from loongplug.models.hf_config import hf_config
from loongplug.training.config import compose_model
from loongplug.training.special_tokens import read_tokenizer, with_token_ids
from loongplug.verify.tiny_processor import write_processor
from loongplug.verify.tiny_sizes import kind_of


def saved_model(folder: Path, name: str, *overrides: str) -> Path:
    """With weights that are large enough for answers to depend on what is seen and heard."""
    composed = compose_model(model_name=name, overrides=overrides)
    write_processor(folder, kind_of(composed.config))
    special = composed.family.special_tokens
    described = composed.family.load_hugging_face(
        with_token_ids(composed.config, read_tokenizer(folder), special_tokens=special)
    )
    torch.manual_seed(3)  # no answer has a token of media
    model = getattr(transformers, described.in_transformers.architecture)(hf_config(described))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    end = transformers.AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    return folder
