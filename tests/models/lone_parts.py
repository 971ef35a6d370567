"""One part of a model alone: built, and read from files as if it were a whole model."""

from collections.abc import Mapping
from typing import Any

import torch
from hf_reference import LIMIT, relative_error
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from loongplug.models import audio_transformer, hf_mapping, patch_transformer, projectors
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.models.parts import Part, load
from loongplug.models.registry import InTransformers


def part_of(config: Any) -> Part:
    """The registered part of a config's class."""
    packages = (audio_transformer, patch_transformer, projectors)
    parts = (part for package in packages for part in package.LOONGPLUG_PARTS)
    (part,) = (each for each in parts if each.config_class is type(config))
    return part


def as_whole(mapping: hf_mapping.Mapping) -> HuggingFaceModel:
    """A model that is nothing but the part of this mapping."""
    nowhere = InTransformers(config_class="", architecture="", roots={})
    return HuggingFaceModel(mapping=mapping, in_transformers=nowhere, sections={}, top={})


def lone_encoder(config: Any, *, name: str, tp: int) -> torch.nn.ModuleDict:
    """Built by the part over Megatron's current groups, named as in a whole model."""
    decoder = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    encoder = load(part_of(config).build)(config, decoder=decoder, groups=groups, backend="local")
    encoder.pg_collection = groups
    return torch.nn.ModuleDict({name: encoder})


def assert_all_near(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, and by each the same values but for rounding."""
    assert set(found) == set(wanted)
    errors = {name: relative_error(found[name], each) for name, each in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < LIMIT, (worst, errors[worst])
