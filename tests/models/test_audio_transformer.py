"""Audio transformers alone against transformers' encoders: features and every gradient."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import META, meta_device, no_waits
from lone_parts import Result, assert_same, assert_same_files, encoder_step, loss_of, refusal
from ranks import model_parallel, run_ranks
from safetensors.torch import save_file
from sounds import (
    NAME,
    TOWERS,
    encoder_within,
    mapping_of,
    our_model,
    their_features,
    their_model,
    tower_of,
    unit,
)

from loongplug.models.audio_transformer import AudioTransformerConfig
from loongplug.platform.devices import to_device

each_tower = pytest.mark.parametrize("name", TOWERS)


def reference(config: AudioTransformerConfig, folder: Path) -> Result:
    """transformers', whose tower is written to ``folder`` under its names in a whole model."""
    model, tower = their_model(config), tower_of(config)
    features = their_features(config, model, tower.sounds)
    loss_of(features).backward()
    named = {f"{tower.root}.{n}": p for n, p in encoder_within(model).named_parameters()}
    own = {n: p.detach() for n, p in named.items() if ".proj." not in n}  # the projector's
    save_file(own, folder / "model.safetensors")
    gradients = {name: each.grad for name, each in named.items() if each.grad is not None}
    return Result(features.detach(), gradients)


def run(
    config: AudioTransformerConfig,
    folder: Path,
    *,
    tp: int = 1,
    empty: bool = False,
    only: int | None = None,
) -> Result:
    """Ours, with the weights of ``folder``."""
    media = None if empty else unit(config, tower_of(config).sounds, only=only)
    return encoder_step(config, folder, media, name=NAME, mapping=mapping_of(config), tp=tp)


@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        (1, {}),
        (2, {}),
        (2, {"recompute": True}),
        (1, {"num_attention_heads": 3, "activation": "gelu_pytorch_tanh"}),
    ],
    ids=["tp1", "tp2", "tp2-recompute", "three-heads-tanh"],
)
@each_tower
def test_features_and_gradients_are_those_of_transformers(
    name: str, tp: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = TOWERS[name].config(**changes)
    expected = reference(config, tmp_path)
    found = run(config, tmp_path, tp=tp)
    assert_same(found, expected)
    assert found.of_keys
    assert not any(bool(each.any()) for both in found.of_keys for each in both)
    assert_same_files(found, tmp_path)


@pytest.mark.parametrize("name", ["qwen2_audio", "omni"])
def test_a_sound_alone_has_the_features_that_it_has_among_others(name: str, tmp_path: Path) -> None:
    config, sounds = TOWERS[name].config(), TOWERS[name].sounds
    reference(config, tmp_path)
    among = run(config, tmp_path).features
    tokens = [config.tokens(config.sizes.grid(each)) for each in sounds]
    assert sum(tokens) == len(among)
    for number in (1, len(sounds) - 1):
        alone = run(config, tmp_path, only=number).features
        torch.testing.assert_close(alone, among.split(tokens)[number], rtol=1e-5, atol=1e-5)


@each_tower
def test_an_empty_unit_gives_every_parameter_that_trains_a_gradient_of_zero(
    name: str, tmp_path: Path
) -> None:
    config = TOWERS[name].config()
    trained = set(reference(config, tmp_path).gradients)
    found = run(config, tmp_path, empty=True)
    assert set(found.gradients) == trained
    assert not any(bool(each.any()) for each in found.gradients.values())
    tokens = config.max_positions if name == "whisper" else 1
    assert found.features.shape == (tokens, config.hidden_size)


def on_meta(rank: int, *, config: AudioTransformerConfig) -> tuple[int, ...]:
    """Forward and backward where nothing has values."""
    with model_parallel(), meta_device():
        with META:
            encoder = our_model(config)[NAME]
        given = unit(config, tower_of(config).sounds)
        given = dataclasses.replace(given, rows=to_device(given.rows, META))
        with no_waits():
            states, _ = encoder(given)
            states.sum().backward()
        assert all(each.grad is not None for each in encoder.parameters() if each.requires_grad)
        return tuple(states.shape)


@each_tower
def test_the_device_is_asked_for_nothing(name: str) -> None:
    config = TOWERS[name].config()
    tokens = sum(config.tokens(config.sizes.grid(each)) for each in TOWERS[name].sounds)
    assert run_ranks(on_meta, 1, config=config) == [(tokens, config.hidden_size)]


@pytest.mark.parametrize(
    ("name", "changes", "sounds", "said"),
    [
        ("whisper", {}, (18, 17), "has 17 frames of 10 ms, but the encoder takes 18 to 18"),
        ("qwen2_audio", {}, (23,), "has 23 frames of 10 ms, but the encoder takes 3 to 22"),
        ("omni", {}, (6, 2), "has 2 frames of 10 ms, but the encoder takes 3 to 50"),
        ("omni", {"n_window": 9}, (6,), "choose an n_window within 1 and 8"),
        ("whisper", {"activation": "relu"}, (18,), "known are quick_gelu, gelu"),
    ],
)
def test_what_it_cannot_do_is_refused(
    name: str, changes: dict[str, Any], sounds: tuple[int, ...], said: str
) -> None:
    config = TOWERS[name].config(**changes)
    grids = [config.sizes.grid(each) for each in sounds]
    (message,) = run_ranks(refusal, 1, config=config, name=NAME, grids=grids)
    assert said in message
