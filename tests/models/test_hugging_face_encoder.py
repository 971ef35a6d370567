"""LLaVA behind towers that transformers computes: agreement, files, what never trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gathered import gather_full_tensors
from hf_models import Layout, build_chunks, decoder_config, reference_model
from hf_reference import Reference, assert_agrees, reference
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file
from tiny_families import PATCH, SIDE, llava, pictured

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig, settings_of
from loongplug.models.llava import LlavaConfig
from loongplug.models.registry import family_of
from loongplug.training.config import compose_model
from loongplug.training.freezing import apply_freezing

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": SIDE * PATCH,
}


def tower(kind: str, *, feature_layer: int = -2, **settings: Any) -> HuggingFaceEncoderConfig:
    return HuggingFaceEncoderConfig(
        model_type=kind, settings=SIZES | settings, feature_layer=feature_layer
    )


TOWERS = {
    "vit": tower("vit"),
    # Training, transformers would move positions at random.
    "dinov3_vit": tower("dinov3_vit", rope_theta=7.0, pos_embed_rescale=None),
    "siglip_vision_model": tower("siglip_vision_model", feature_layer=2),
}
each_tower = pytest.mark.parametrize("kind", TOWERS)


@pytest.fixture(scope="module", params=TOWERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = pictured(llava(TOWERS[request.param]))
    folder = tmp_path_factory.mktemp("hf")
    return reference(folder, family.model, family.data(), family.arguments)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(pp=2, recompute=True), Layout(dp=2, overlap_grad_reduce=True)],
    ids=str,
)
def test_step_agrees_with_transformers(made: Reference, layout: Layout) -> None:
    assert_agrees(made, layout)


def folder_of(folder: Path, kind: str) -> Path:
    """Weights and config.json, as transformers saves a model."""
    reference_model(llava(TOWERS[kind])).save_pretrained(folder)
    return folder


def loaded_and_frozen(rank: int, *, folder: Path, model: LlavaConfig) -> tuple[Any, list[str]]:
    """All weights after an import, and our names of what trains with every pattern for it."""
    with model_parallel():
        chunks = build_chunks(model, decoder_config(model, Layout()), Layout())
        hugging_face = family_of(model).load_hugging_face(model)
        load_hf_weights(chunks, folder, model=hugging_face)
        apply_freezing(
            chunks,
            Freezing(modules=("image_encoder",), train=("*",)),
            mapping=hugging_face.mapping,
        )
        trains = [
            name
            for name, each in chunks[0].named_parameters()
            if each.requires_grad and name.startswith("image_encoder.")
        ]
        weights = gather_full_tensors(chunks, hugging_face.mapping)
        buffers = chunks[0].bfloat16().image_encoder.tower.named_buffers()
        assert all(each.dtype != torch.bfloat16 for _, each in buffers)
        assert next(chunks[0].image_encoder.parameters()).dtype == torch.bfloat16
        return weights, trains


@each_tower
def test_a_folder_is_enough_and_what_no_feature_comes_from_never_trains(
    kind: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, kind)
    model = compose_model(hf_folder=folder).config
    assert isinstance(model, LlavaConfig)
    encoder = model.image_encoder
    if kind == "siglip_vision_model":  # it has a part of its own
        assert not isinstance(encoder, HuggingFaceEncoderConfig)
        model = llava(TOWERS[kind])
    else:
        assert isinstance(encoder, HuggingFaceEncoderConfig)
        assert hf_config(family_of(model).load_hugging_face(model)).to_dict() == (
            hf_config(family_of(model).load_hugging_face(llava(TOWERS[kind]))).to_dict()
        )
    assert hf_config_differences(folder, family_of(model).load_hugging_face(model)) == []
    ((weights, trains),) = run_ranks(loaded_and_frozen, 1, folder=folder, model=model)
    assert trains
    tower = TOWERS[kind].tower
    assert {name.removeprefix("image_encoder.tower.") for name in trains} == (
        tower.shapes.keys() - tower.carried
    )
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == weights.keys()
    for name, tensor in saved.items():
        assert tensor.shape == weights[name].shape
        assert torch.equal(tensor, weights[name]), name


def test_settings_are_compared_with_config_json(tmp_path: Path) -> None:
    model = llava(tower("dinov3_vit", rope_theta=9.0, pos_embed_rescale=None))
    hugging_face = family_of(model).load_hugging_face(model)
    folder = folder_of(tmp_path, "dinov3_vit")
    (line,) = hf_config_differences(folder, hugging_face)
    assert "vision_config.rope_theta 7.0, expected 9.0" in line


def test_overrides_reach_the_settings(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "vit")
    overrides = ["model.image_encoder.settings.hidden_size=64"]
    composed = compose_model(hf_folder=folder, overrides=overrides)
    assert composed.config.image_encoder.hidden_size == 64
    (tmp_path / "again.yaml").write_text("# @package _global_\n" + composed.to_yaml())
    assert compose_model(config_file=tmp_path / "again.yaml").config == composed.config


def test_code_of_a_folder_is_never_run() -> None:
    section = TOWERS["vit"].in_transformers
    section.auto_map = {"AutoModel": "modeling.Model"}
    try:
        with pytest.raises(ValueError, match="auto_map in the section of vit"):
            settings_of(section)
    finally:
        del section.auto_map


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("my_vit", {}, "model_type is 'my_vit', which the installed transformers does not have"),
        ("vit", {"hidden_sizes": 8}, "settings has hidden_sizes, which ViTConfig"),
        ("vit", {"patch_size": [2, 5]}, r"patch_size \[2, 5\], and a whole number"),
        ("vit", {"hidden_size": "x"}, "settings make no ViTConfig"),
    ],
)
def test_no_such_encoder(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tower(kind, **settings)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (tower("dinov3_vit", num_register_tokens=2), "28 states of an image of 25 patches"),
        (tower("vit", image_size=11), "gives no hidden states of an image of 10 x 10 pixels"),
        (tower("vit", feature_layer=4), "feature_layer is 4 in an encoder of 3 layers"),
    ],
)
def test_no_tower_for_us(encoder: HuggingFaceEncoderConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder.tower  # noqa: B018  it is found out here


def build_with_two_ranks(rank: int, *, model: LlavaConfig) -> str:
    with model_parallel(tp=2):
        with pytest.raises(ValueError, match="not split") as caught:
            build_chunks(model, decoder_config(model, Layout(tp=2)), Layout(tp=2))
        return str(caught.value)


def test_it_is_not_split() -> None:
    first, _ = run_ranks(build_with_two_ranks, 2, model=llava(TOWERS["vit"]))
    assert "model.image_encoder.tensor_model_parallel_size=1 with --enable-encoder" in first


@pytest.mark.parametrize(
    ("kind", "idle"),
    [("vit", "attention.k_proj.bias"), ("siglip_vision_model", "self_attn.k_proj.bias")],
)
def test_biases_of_keys_that_nothing_turns_are_idle(kind: str, idle: str) -> None:
    tower = TOWERS[kind].tower
    assert tower.idle == {name for name in tower.shapes if name.endswith(idle)} - tower.carried
    assert len(tower.idle) == 2


def test_keys_that_positions_turn_are_not() -> None:
    turned = tower("dinov3_vit", rope_theta=7.0, pos_embed_rescale=None, key_bias=True)
    assert any(name.endswith("k_proj.bias") for name in turned.tower.shapes)
    assert not turned.tower.idle
