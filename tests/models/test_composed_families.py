"""Parts of some families in others, which are data alone: built, loaded and trained in layouts."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hf_batches import TOKEN_IDS, Medium, Style, batch, qwen3_positions
from hf_models import Layout, trusted
from hf_reference import Reference, assert_agrees, our_step
from ranks import run_ranks
from safetensors.torch import save_file
from tiny_families import QWEN2_5_VL, QWEN3_VL_MOE
from towers import TOWERS

from loongplug.models.projectors import PixelShuffleConfig
from loongplug.models.qwen3_vl import Qwen3DecoderConfig
from loongplug.models.registry import families, family_of
from loongplug.verify.weights import random_tensor

PACKAGE = "composed_vl"
TILE = Medium((1, 4, 4))
# Values of a patch, media of the samples, and layers behind the one that features come from.
DATA: dict[str, tuple[int, tuple[tuple[Medium, ...], ...], str]] = {
    "composed_vl": (
        3 * 2 * 14 * 14,
        (
            (Medium((1, 6, 10)), Medium((1, 2, 2))),
            (),
            (Medium((1, 4, 6)), Medium((1, 2, 6))),
            (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
        ),
        "none",
    ),
    "paired_vl": (
        3 * 4 * 4,
        ((TILE, TILE), (), (TILE,), (TILE, TILE, TILE)),
        "vision_tower.encoder.layer.2.",
    ),
}
CASES = [
    ("composed_vl", Layout(tp=2, pp=2, sequence_parallel=True)),
    ("composed_vl", Layout(dp=2, ep=2, micro_batch_size=2)),
    ("paired_vl", Layout(tp=2, pp=2, sequence_parallel=True)),
    ("paired_vl", Layout(dp=2, overlap_grad_reduce=True)),
]


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with trusted(PACKAGE):
        yield


def parts_of(name: str) -> dict[str, Any]:
    if name == "composed_vl":
        return {
            "image_encoder": QWEN2_5_VL.image_encoder,
            "image_projector": QWEN2_5_VL.image_projector,
            "foundation": QWEN3_VL_MOE.foundation,
        }
    text = Qwen3DecoderConfig(
        num_layers=2,
        hidden_size=40,
        ffn_hidden_size=80,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=12,
        vocab_size=128,
        mrope_section=(2, 2, 2),
    )
    return {
        "image_encoder": TOWERS["intern"].config(side=4, feature_layer=-2),
        "image_projector": PixelShuffleConfig(),
        "foundation": text,
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's step on one rank, made once."""

    @cache
    def of(name: str) -> Reference:
        values, media, behind = DATA[name]
        data = batch(Style(patch_values=values, positions=qwen3_positions), media=media)
        model = families([PACKAGE])[name].config_class(**parts_of(name), **TOKEN_IDS)
        folder = tmp_path_factory.mktemp("weights")
        described = family_of(model, trusted_packages=[PACKAGE]).load_hugging_face(model)
        sources = [each for bundle in described.mapping.bundles() for each in bundle.sources]
        tensors = {each.name: random_tensor(each, seed=0) for each in sources}
        save_file(tensors, folder / "model.safetensors")
        given = {"folder": folder, "model": model, "layout": Layout(), "data": data}
        (step,) = run_ranks(our_step, 1, **given, options={})
        # All others have a gradient: none is left out of the composition.
        without = set(tensors) - set(step.gradients)
        assert without == {each for each in tensors if each.startswith(behind)}
        assert bool(without) == (name == "paired_vl")
        return Reference(model, folder, data, step)

    return of


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_step_is_that_of_a_single_rank(single: Any, name: str, layout: Layout) -> None:
    assert_agrees(single(name), layout)
