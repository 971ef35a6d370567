"""Patch transformers alone against transformers' towers: features and every gradient."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gathered import gather_full_tensors, replica_differences
from hf_reference import LIMIT, relative_error
from lone_parts import as_whole, assert_all_near
from megatron.core.transformer.transformer_block import TransformerBlock
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file, save_file
from towers import (
    NAME,
    ROOT,
    TOWERS,
    images,
    mapping_of,
    our_model,
    replaced,
    their_features,
    their_model,
    unit,
    weights_of_loss,
)

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.data.microbatch import MediaInput
from loongplug.models.patch_transformer.config import PatchTransformerConfig
from loongplug.models.patch_transformer.encoder import PatchTransformer, ScaledResidual

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


@dataclass(frozen=True)
class Result:
    """Features [patches, hidden] and gradients by the names of the files; of ours, more.

    ``weights`` by the same names, and how far copies of gradients are ``apart`` by our names.
    """

    features: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)


def reference(config: PatchTransformerConfig, folder: Path) -> Result:
    """transformers', whose files are written to ``folder`` as LLaVA has the tower."""
    model, names = their_tower(config, folder)
    features = their_features(config, model, images(config, count=COUNT))
    (features * weights_of_loss(config, count=COUNT)).sum().backward()
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


def ours(
    rank: int, *, config: PatchTransformerConfig, folder: Path, tp: int, empty: bool
) -> Result:
    """Gradients and weights are rank 0's."""
    with model_parallel(tp=tp):
        model, mapping = our_model(config, tp=tp), mapping_of(config)
        load_hf_weights([model], folder, model=as_whole(mapping))
        encoder = model[NAME]
        pixels = images(config, count=COUNT)
        states, taps = encoder(encoder.blank_unit() if empty else unit(config, pixels))
        assert not taps
        weights = weights_of_loss(config, count=COUNT)
        (states[:0].sum() if empty else (states * weights).sum()).backward()
        return Result(
            features=states.detach(),
            gradients=gather_full_tensors([model], mapping, what="grad") or {},
            weights=gather_full_tensors([model], mapping) or {},
            apart=replica_differences([model], mapping, what="grad"),
        )


def run(
    config: PatchTransformerConfig, folder: Path, *, tp: int = 1, empty: bool = False
) -> Result:
    """Ours, with the weights of ``folder``."""
    results: list[Result] = run_ranks(ours, tp, config=config, folder=folder, tp=tp, empty=empty)
    return results[0]


def assert_features(found: Result, wanted: Result) -> None:
    error = relative_error(found.features, wanted.features)
    assert error < LIMIT, ("features", error)


def _fused(
    config: PatchTransformerConfig, gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """With q, k and v in one: a key's bias changes no output, and transformers gives it noise."""
    q, k, v = config.names.qkv
    joined = dict(gradients)
    for name in gradients:
        if f".{q}." in name:
            parts = [joined.pop(name.replace(q, each)) for each in (q, k, v)]
            joined[name.replace(q, "qkv")] = torch.cat(parts)
    return joined


def assert_same(config: PatchTransformerConfig, found: Result, wanted: Result) -> None:
    assert_features(found, wanted)
    keys = [each for name, each in found.gradients.items() if f"{config.names.qkv[1]}.bias" in name]
    assert len(keys) == config.computed_layers
    assert not any(bool(each.any()) for each in keys)
    ours, theirs = (_fused(config, each.gradients) for each in (found, wanted))
    assert_all_near(ours, theirs)


@pytest.fixture(scope="module", params=CASES)
def wanted(request: Any, tmp_path_factory: Any) -> tuple[PatchTransformerConfig, Path, Result]:
    config = case(request.param)
    folder = tmp_path_factory.mktemp("tower")
    return config, folder, reference(config, folder)


def test_features_and_gradients_are_those_of_transformers(wanted) -> None:
    config, folder, expected = wanted
    result = run(config, folder)
    assert_same(config, result, expected)
    before = load_file(folder / "model.safetensors")
    assert result.weights.keys() == before.keys()  # what only travels, too
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", ["clip", "siglip, normed", "dinov2", "intern"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"recompute": True}, {"tp": 2, "recompute": True}])
def test_layouts_change_nothing(tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    config = case(name)
    expected = reference(config, tmp_path)
    recomputed = replaced(config, recompute=layout.get("recompute", False))
    result = run(recomputed, tmp_path, tp=layout.get("tp", 1))
    assert_same(config, result, expected)
    assert max(result.apart.values()) < 1e-6
    before = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(result.weights[each], tensor) for each, tensor in before.items())


@pytest.mark.parametrize("name", CASES)
def test_an_empty_unit_gives_every_parameter_that_trains_a_gradient_of_zero(
    tmp_path: Path, name: str
) -> None:
    config = case(name)
    trained = set(reference(config, tmp_path).gradients)
    result = run(config, tmp_path, empty=True)
    assert set(result.gradients) == trained
    assert not any(bool(each.any()) for each in result.gradients.values())
    assert result.features.shape == (config.spatial_merge_size**2, config.hidden_size)


def mutated_places(self: PatchTransformer, side: int, device: torch.device) -> torch.Tensor:
    """Row by row, whatever the blocks."""
    own_tokens = int(self.class_token is not None)
    return torch.arange(own_tokens + side**2)


def shifted_places(self: PatchTransformer, side: int, device: torch.device) -> torch.Tensor:
    return PLACES(self, side, device).roll(1)


PLACES = PatchTransformer._places


def rolled(self: TransformerBlock, **given: Any) -> torch.Tensor:
    """As if the first rows of an image were its patches', and the class token one of them."""
    return FORWARD(self, **given).unflatten(0, (COUNT, -1)).roll(1, dims=1).flatten(0, 1)


FORWARD = TransformerBlock.forward


def unscaled(self: ScaledResidual, training: bool, fused: bool) -> Any:
    def add(added: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = added
        return residual + output + (0 if bias is None else bias) + 0 * self.weight

    return add


@pytest.mark.parametrize(
    ("name", "target", "attribute", "mutation"),
    [
        ("intern", PatchTransformer, "_places", mutated_places),
        ("clip", PatchTransformer, "_places", shifted_places),
        ("dinov2", ScaledResidual, "forward", unscaled),
        ("clip", TransformerBlock, "forward", rolled),
    ],
)
def test_mutated_code_is_seen(
    tmp_path: Path, monkeypatch: Any, name: str, target: Any, attribute: str, mutation: Any
) -> None:
    config = case(name)
    expected = reference(config, tmp_path)
    monkeypatch.setattr(target, attribute, mutation)
    with pytest.raises(AssertionError):
        assert_same(config, run(config, tmp_path), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("clip", {"activation": "gelu"}),
        ("clip", {"activation": "gelu_pytorch_tanh"}),
        ("clip", {"layernorm_epsilon": 1e-3}),
        ("clip", {"num_attention_heads": 2}),
        ("clip", {"feature_layer": -1}),
        ("clip", {"feature_layer": -3}),
        ("siglip, three heads", {"activation": "gelu"}),
    ],
)
def test_another_architecture_of_the_same_shapes_is_seen(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    config = case(name)
    expected = reference(config, tmp_path)
    with pytest.raises(AssertionError):
        assert_same(config, run(replaced(config, **changes), tmp_path), expected)


def refusal(rank: int, *, config: PatchTransformerConfig, grids: list[list[int]] | None) -> str:
    with model_parallel():
        try:
            encoder = our_model(config)[NAME]
            assert grids is not None
            patches = sum(time * height * width for time, height, width in grids)
            pixels = torch.zeros(patches, config.in_channels * config.patch_size**2)
            encoder(MediaInput(rows=pixels, grids=torch.tensor(grids)))
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("changes", "grids", "said"),
    [
        ({}, [[1, 5, 5], [1, 5, 4]], "5 x 4 patches, but the encoder's position table is of 5 x 5"),
        ({}, [[1, 1, 1], [1, 1, 1]], "1 x 1 patches, but the encoder's position table is of 5 x 5"),
        ({"activation": "relu"}, None, "known are quick_gelu, gelu, gelu_pytorch_tanh"),
        ({"feature_layer": 4}, None, "must be within 1 and 3, or within -3 and -1"),
        ({"feature_layer": 0}, None, "feature_layer is 0 in an encoder of 3 layers"),
        ({"feature_layer": -4}, None, "feature_layer is -4 in an encoder of 3 layers"),
        ({"temporal_patch_size": 2}, None, "set it to 1"),
        ({"spatial_merge_size": 2}, None, "5 patches a side, which cannot be merged in blocks"),
        ({"final_norm": True}, None, "of the pooled class token alone"),
    ],
)
def test_what_it_cannot_do_is_refused(
    changes: dict[str, Any], grids: list[list[int]] | None, said: str
) -> None:
    (message,) = run_ranks(refusal, 1, config=TOWERS["clip"].config(**changes), grids=grids)
    assert said in message
