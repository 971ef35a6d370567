"""Every model of the YAML files on the meta device: its parameters are those of transformers."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import model_parallel, run_ranks

from loongplug.models.hf_model import HuggingFaceModel, hf_config
from loongplug.training.config import available_models, compose_model
from loongplug.training.sizes import (
    ModelSize,
    _arguments,
    build_on_meta,
    markdown_table,
    model_size,
    with_placeholder_ids,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def hugging_face(name: str) -> HuggingFaceModel:
    composed = compose_model(model_name=name)
    return composed.family.load_hugging_face(with_placeholder_ids(composed))


def reference_counts(name: str) -> tuple[int, int]:
    """Parameters in all, and those a token meets, by transformers' own modules and config."""
    model = hugging_face(name)
    config = hf_config(model)
    with torch.device("meta"):
        reference = getattr(transformers, model.architecture)(config)
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


def sizes_and_devices(rank: int) -> dict[str, tuple[ModelSize, set[str]]]:
    found = {}
    with model_parallel():
        for name in available_models():
            composed = compose_model(model_name=name)
            size = model_size(name, composed)
            model = build_on_meta(
                with_placeholder_ids(composed), composed.family, _arguments(composed)
            )
            tensors = [*model.parameters(), *model.buffers()]
            found[name] = size, {tensor.device.type for tensor in tensors}
    return found


@pytest.fixture(scope="module")
def built() -> dict[str, tuple[ModelSize, set[str]]]:
    (found,) = run_ranks(sizes_and_devices, 1, timeout=120.0)
    return found


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


def table(rank: int) -> str:
    with model_parallel():
        return markdown_table()


def test_docs_show_the_sizes_as_they_are() -> None:
    text = DOCS.read_text(encoding="utf-8")
    match = re.search(r"<!-- sizes: begin -->\n(.*?)\n<!-- sizes: end -->", text, re.DOTALL)
    assert match is not None
    (expected,) = run_ranks(table, 1, timeout=120.0)
    assert match[1] == expected, (
        "docs/models.md is stale: put the output of `python -m loongplug.training.sizes` "
        "between its marks"
    )
