"""Patch transformers alone against transformers' towers: features and every gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lone_parts import Result, assert_same, assert_same_files, encoder_step, loss_of, refusal
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from towers import NAME, ROOT, TOWERS, images, mapping_of, their_features, their_model, unit

from loongplug.models.patch_transformer import PatchTransformerConfig

COUNT = 3

CASES = {  # kind, options
    "clip": ("clip", {"feature_layer": -2}),
    "clip, last": ("clip", {"feature_layer": -1}),
    "clip, first, in blocks": ("clip", {"feature_layer": 1, "side": 6, "spatial_merge_size": 2}),
    "clip, three heads, exact gelu": (
        "clip",
        {"num_attention_heads": 3, "hidden_size": 27, "activation": "gelu", "feature_layer": 2},
    ),
    "siglip": ("siglip", {"feature_layer": -1, "side": 7}),
    "siglip, normed": ("siglip", {"final_norm": True, "head": False}),
    "siglip, three heads": (
        "siglip",
        {"num_attention_heads": 3, "hidden_size": 27, "feature_layer": -2},
    ),
    "dinov2": ("dinov2", {"feature_layer": -2}),
    "dinov2, normed": ("dinov2", {"final_norm": True, "mask_token": False}),
    "intern": ("intern", {"side": 6}),
    "intern, normed": ("intern", {"side": 6, "final_norm": True, "mask_token": True}),
    "intern, normed, before": ("intern", {"side": 4, "final_norm": True, "feature_layer": -3}),
}


def case(name: str) -> PatchTransformerConfig:
    kind, options = CASES[name]
    return TOWERS[kind].config(**options)


def reference(config: PatchTransformerConfig, folder: Path) -> Result:
    """transformers', whose files are written to ``folder`` as LLaVA has the tower."""
    model, names = their_tower(config, folder)
    features = their_features(config, model, images(config, count=COUNT))
    loss_of(features).backward()
    return Result(
        features.detach(),
        {
            names[own]: parameter.grad
            for own, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )


def their_tower(config: PatchTransformerConfig, folder: Path) -> tuple[Any, dict[str, str]]:
    """transformers' model and, by its names, those of the files, which are written to ``folder``.

    Files have names of their own: a parameter's is that of the tensor with its values.
    """
    model = their_model(config)
    model.save_pretrained(folder)
    tensors = {f"{ROOT}.{k}": each for k, each in load_file(folder / "model.safetensors").items()}
    (folder / "config.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    names = {}
    for own, parameter in model.named_parameters():
        (names[own],) = (
            name
            for name, tensor in tensors.items()
            if tensor.shape == parameter.shape and torch.equal(tensor, parameter)
        )
    return model, names


def assert_agrees(found: Result, wanted: Result, config: PatchTransformerConfig) -> None:
    """A key's bias changes no output: transformers gives it noise, and we nothing."""
    assert_same(found, wanted)
    assert len(found.of_keys) == config.computed_layers
    assert not any(bool(gradient.any()) for _, gradient in found.of_keys)


@pytest.fixture(scope="module", params=CASES)
def wanted(request: Any, tmp_path_factory: Any) -> tuple[PatchTransformerConfig, Path, Result]:
    config = case(request.param)
    folder = tmp_path_factory.mktemp("tower")
    return config, folder, reference(config, folder)


def test_features_and_gradients_are_those_of_transformers(wanted) -> None:
    config, folder, expected = wanted
    media = unit(config, images(config, count=COUNT))
    result = encoder_step(config, folder, media, name=NAME, mapping=mapping_of(config))
    assert_agrees(result, expected, config)
    assert_same_files(result, folder)


@pytest.mark.parametrize(
    ("changes", "grids", "said"),
    [
        ({}, [[1, 5, 5], [1, 5, 4]], "5 x 4 patches, but the encoder's position table is of 5 x 5"),
        ({}, [[1, 1, 1], [1, 1, 1]], "1 x 1 patches, but the encoder's position table is of 5 x 5"),
        ({"activation": "relu"}, [], "known are quick_gelu, gelu, gelu_pytorch_tanh"),
        ({"feature_layer": 4}, [], "must be within 1 and 3, or within -3 and -1"),
        ({"feature_layer": 0}, [], "feature_layer is 0 in an encoder of 3 layers"),
        ({"feature_layer": -4}, [], "feature_layer is -4 in an encoder of 3 layers"),
        ({"temporal_patch_size": 2}, [], "set it to 1"),
        ({"spatial_merge_size": 2}, [], "5 patches a side, which cannot be merged in blocks"),
        ({"final_norm": True}, [], "of the pooled class token alone"),
    ],
)
def test_what_it_cannot_do_is_refused(
    changes: dict[str, Any], grids: list[list[int]], said: str
) -> None:
    config = TOWERS["clip"].config(**changes)
    (message,) = run_ranks(refusal, 1, config=config, name=NAME, grids=grids)
    assert said in message
