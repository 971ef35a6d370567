"""The models of the runs, composed from their YAML, with the ids of the tiny tokenizer."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from gpu_steps.sizes import ModelRun

# The tokenizer of the data is a tiny one, whose special tokens have ids of their own.
IDS_OF_THE_TOKENIZER = tuple(
    f"model.{name}_token_id=null" for name in ("image", "video", "vision_start", "vision_end")
)


def composed_of(run: ModelRun) -> Any:
    """Its architecture, checked, and its family."""
    from loongplug.training.config import compose_model

    return compose_model(model_name=run.model, overrides=[*run.overrides, *IDS_OF_THE_TOKENIZER])


def config_of(run: ModelRun) -> Any:
    """The checked architecture."""
    return composed_of(run).config


def hf_config_of(run: ModelRun, *, processor: Path) -> Any:
    """The same architecture as a config of transformers, with the tokenizer's ids."""
    from loongplug.models.hf_config import hf_config
    from loongplug.training.special_tokens import read_tokenizer, with_token_ids

    composed = composed_of(run)
    config = with_token_ids(
        composed.config,
        read_tokenizer(processor),
        special_tokens=composed.family.special_tokens,
    )
    return hf_config(composed.family.load_hugging_face(config))


def amounts_of(run: ModelRun) -> Any:
    """Its work, as a run counts it whose patterns freeze nothing."""
    from loongplug.models.amounts import ModelAmounts
    from loongplug.training.freezing import freezing_of

    composed = composed_of(run)
    freezing = freezing_of(Namespace(freeze_parameters=(), train_parameters=()), composed.config)
    hugging_face = composed.family.load_hugging_face(composed.config)
    return ModelAmounts.of(composed.config, hugging_face, trains=freezing.trains)
