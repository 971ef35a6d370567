"""Every model of the YAML files on the meta device: its parameters are those of transformers."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pages import sizes
from pages.marked import content
from pages.sizes import ModelSize, with_placeholder_ids
from ranks import model_parallel, run_ranks

from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_config import hf_config
from loongplug.training import provider
from loongplug.training.config import available_models, compose_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def hugging_face(name: str) -> HuggingFaceModel:
    composed = compose_model(model_name=name)
    return composed.family.load_hugging_face(with_placeholder_ids(composed))


def reference_counts(name: str) -> tuple[int, int]:
    """Parameters in all, and those a token meets, by transformers' own modules and config."""
    model = hugging_face(name)
    config = hf_config(model)
    with torch.device("meta"):
        reference = getattr(transformers, model.in_transformers.architecture)(config)
    reference.tie_weights()
    parameters = dict(reference.named_parameters())  # tied ones once
    total = sum(parameter.numel() for parameter in parameters.values())
    text: Any = config.get_text_config()
    experts = getattr(text, "num_experts", None)
    if not experts:
        return total, total
    in_experts = sum(p.numel() for key, p in parameters.items() if ".experts." in key)
    assert in_experts
    return total, total - in_experts * (experts - text.num_experts_per_tok) // experts


def sizes_and_devices(rank: int) -> list[tuple[ModelSize, set[str]]]:
    devices: list[set[str]] = []
    build = provider.build_on_meta

    def build_and_look(*args: Any) -> torch.nn.Module:
        model = build(*args)
        devices.append({tensor.device.type for tensor in [*model.parameters(), *model.buffers()]})
        return model

    provider.build_on_meta = build_and_look
    with model_parallel():
        names = available_models()
        found = [sizes.model_size(name, compose_model(model_name=name)) for name in names]
    return list(zip(found, devices, strict=True))


@pytest.fixture(scope="module")
def built() -> dict[str, tuple[ModelSize, set[str]]]:
    (found,) = run_ranks(sizes_and_devices, 1, timeout=120.0)
    return {size.name: (size, devices) for size, devices in found}


@pytest.mark.parametrize("name", available_models())
def test_parameters_are_those_of_transformers(
    built: dict[str, tuple[ModelSize, set[str]]], name: str
) -> None:
    size, devices = built[name]
    assert devices == {"meta"}  # nothing was allocated
    assert (size.parameters, size.active) == reference_counts(name)
    assert sum(size.modules.values()) == size.parameters
    # What an export writes, tensor by tensor.
    sources = hugging_face(name).mapping.sources()
    assert sum(map(prod, sources.values())) == size.parameters


def test_docs_show_the_sizes_as_they_are(built: dict[str, tuple[ModelSize, set[str]]]) -> None:
    text = DOCS.read_text(encoding="utf-8")
    expected = sizes.markdown_tables([size for size, _ in built.values()])
    assert content(text, sizes.MARK) == expected, (
        "docs/models.md is stale: run 'PYTHONPATH=tests python -m pages.sizes docs/models.md'"
    )


LARGE_TAPS, TAPS = [5, 11, 17], [8, 16, 24]


@pytest.mark.parametrize(
    ("name", "taps", "parameters"),
    [
        ("qwen3_vl_2b", LARGE_TAPS, 2_127_532_032),
        ("qwen3_vl_8b", TAPS, 8_767_123_696),
        ("qwen3_vl_30b_a3b", TAPS, 31_070_754_032),
        ("qwen3_vl_235b_a22b", TAPS, 235_670_022_896),
    ],
)
def test_what_shapes_do_not_tell_is_as_published(
    name: str, taps: list[int], parameters: int
) -> None:
    described = hugging_face(name)
    assert sum(map(prod, described.mapping.sources().values())) == parameters
    assert described.sections["vision_config"]["deepstack_visual_indexes"] == taps
    assert described.sections["vision_config"]["num_heads"] == 16
    rope = described.sections["text_config"]["rope_parameters"]
    assert (rope["rope_theta"], rope["mrope_section"]) == (5e6, [24, 20, 20])
    config = compose_model(model_name=name).config
    assert config.foundation.max_position_embeddings == 262_144
    vit = config.image_encoder
    assert (vit.rotary_base, vit.layernorm_epsilon) == (10_000, 1e-6)
    assert (config.image_token_id, config.video_token_id) == (151655, 151656)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (151652, 151653)
