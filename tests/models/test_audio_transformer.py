"""Audio transformers alone against transformers' encoders: features and every gradient."""

from pathlib import Path
from typing import Any

import pytest
from lone_parts import (
    Result,
    assert_same,
    assert_same_files,
    encoder_step,
    loss_of,
    part_of,
    refusal,
)
from ranks import run_ranks
from safetensors.torch import save_file
from sounds import (
    NAME,
    TOWERS,
    encoder_within,
    mapping_of,
    their_config,
    their_features,
    their_model,
    tower_of,
    unit,
)

from loongplug.models.audio_transformer import AudioTransformerConfig
from loongplug.models.hf_config import _fields

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
    media = unit(config, TOWERS[name].sounds)
    found = encoder_step(config, tmp_path, media, name=NAME, mapping=mapping_of(config), tp=tp)
    assert_same(found, expected)
    assert found.of_keys
    assert not any(bool(each.any()) for both in found.of_keys for each in both)
    assert_same_files(found, tmp_path)


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


@each_tower
def test_config_json_gives_the_config_back(name: str) -> None:
    config = TOWERS[name].config()
    part, section = part_of(config), their_config(config)
    assert section.model_type == part.model_type
    assert _fields(part, section) == {each: getattr(config, each) for each in part.config_json}
