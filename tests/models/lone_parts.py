"""One part of a model alone: built, and read from files as if it were a whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from gathered import gather_full_tensors, replica_differences
from hf_reference import LIMIT, measured, relative_error
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.data.microbatch import MediaInput
from loongplug.data.sample import Grid
from loongplug.models import audio_transformer, hf_mapping, patch_transformer, projectors
from loongplug.models.family import HuggingFaceModel, InTransformers
from loongplug.models.parts import Part, load


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


@dataclass(frozen=True)
class Result:
    """Features and gradients by the names of the files; of ours, more.

    ``weights`` by the same names, how far copies of gradients are ``apart``, and of each layer the
    fused bias of keys with its gradient.
    """

    features: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    apart: float = 0.0
    of_keys: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


def loss_of(features: torch.Tensor) -> torch.Tensor:
    """Each value counts otherwise, the same at every call."""
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(2))
    return (features * weights).sum()


def encoder_step(config: Any, folder: Path, media: MediaInput, **given: Any) -> Result:
    """Of our encoder, with the weights of ``folder``."""
    tp = given.get("tp", 1)
    results: list[Result] = run_ranks(
        _encoder_step, tp, config=config, folder=folder, media=media, **given
    )
    return results[0]


def _encoder_step(
    rank: int,
    *,
    config: Any,
    folder: Path,
    media: MediaInput,
    name: str,
    mapping: hf_mapping.Mapping,
    tp: int = 1,
) -> Result:
    """Gradients and weights are rank 0's."""
    with model_parallel(tp=tp):
        model = lone_encoder(config, name=name, tp=tp)
        load_hf_weights([model], folder, model=as_whole(mapping))
        encoder: Any = model[name]
        states, taps = encoder(media)
        assert not taps
        loss_of(states).backward()
        keys = []
        for layer in encoder.blocks.layers:
            bias = layer.self_attention.linear_qkv.bias
            of_heads = bias.detach(), bias.grad
            shape = (-1, 3, encoder.config.kv_channels)
            keys.append(tuple(each.unflatten(0, shape)[:, 1] for each in of_heads))
        return Result(
            features=states.detach(),
            gradients=gather_full_tensors([model], mapping, what="grad") or {},
            weights=gather_full_tensors([model], mapping) or {},
            apart=max(replica_differences([model], mapping, what="grad").values()),
            of_keys=tuple(keys),
        )


def refusal(rank: int, *, config: Any, name: str, grids: Sequence[Grid] = ()) -> str:
    """What is said where an encoder is built, or given media of these sizes."""
    with model_parallel():
        try:
            encoder = lone_encoder(config, name=name, tp=1)[name]
            rows = torch.zeros(sum(map(prod, grids)), config.row_values)
            encoder(MediaInput(loaded=rows, grids=torch.tensor(grids)))
        except ValueError as error:
            return str(error)
    return "nothing"


def assert_same(found: Result, wanted: Result) -> None:
    """Features and gradients but for rounding; copies of gradients are copies."""
    assert relative_error(found.features, wanted.features) < LIMIT
    assert_all_near(*(measured(each.gradients) for each in (found, wanted)))
    assert found.apart < 1e-6


def assert_same_files(found: Result, folder: Path) -> None:
    """Weights come back to the same bits, and what only travels, too."""
    before = load_file(folder / "model.safetensors")
    assert found.weights.keys() == before.keys()
    for name, tensor in before.items():
        assert found.weights[name].dtype == tensor.dtype
        assert torch.equal(found.weights[name], tensor)


def assert_all_near(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, and by each the same values but for rounding."""
    assert set(found) == set(wanted)
    errors = {name: relative_error(found[name], each) for name, each in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < LIMIT, (worst, errors[worst])
