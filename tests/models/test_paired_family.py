"""A patch transformer and a projector within a whole model, trained in layouts."""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hf_reference
import pytest
from hf_batches import TOKEN_IDS, Batch, Medium, Style, batch, qwen3_positions
from hf_reference import Layout, Step, assert_agreement, our_step
from ranks import run_ranks
from safetensors.torch import save_file
from towers import TOWERS

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.projectors.config import PixelShuffleConfig
from loongplug.models.qwen3_vl.config import Qwen3DecoderConfig
from loongplug.models.registry import family_of
from loongplug.verify.weights import random_tensor

PACKAGE = "paired_vl"
IMAGE = Medium((1, 4, 4))
MEDIA = ((IMAGE, IMAGE), (), (IMAGE,), (IMAGE, IMAGE, IMAGE))
LAYOUTS = [
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(dp=2, overlap_grad_reduce=True),
    Layout(tp=2, recompute=True),
]


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "outside"))
        patch.setattr(hf_reference, "family_of", partial(family_of, trusted_packages=[PACKAGE]))
        yield
    sys.modules.pop(PACKAGE, None)


@pytest.fixture(scope="module")
def data() -> Batch:
    style = Style(patch_values=3 * 4 * 4, frames_apart=False, positions=qwen3_positions)
    return batch(style, media=MEDIA)


@pytest.fixture(scope="module")
def single(
    data: Batch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VisionLanguageArchitecture, Path, Step]:
    """The model, its weights, and its step on one rank."""
    model: VisionLanguageArchitecture = importlib.import_module(PACKAGE).PairedConfig(
        image_encoder=TOWERS["intern"].config(side=4, feature_layer=-2),
        image_projector=PixelShuffleConfig(),
        foundation=Qwen3DecoderConfig(
            num_layers=2,
            hidden_size=40,
            ffn_hidden_size=80,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=12,
            vocab_size=128,
            mrope_section=(2, 2, 2),
        ),
        **TOKEN_IDS,
    )
    folder = tmp_path_factory.mktemp("weights")
    described = family_of(model, trusted_packages=[PACKAGE]).load_hugging_face(model)
    sources = [each for bundle in described.mapping.bundles() for each in bundle.sources]
    tensors = {each.name: random_tensor(each, seed=0) for each in sources}
    save_file(tensors, folder / "model.safetensors")
    (step,) = run_ranks(
        our_step, 1, folder=folder, model=model, layout=Layout(), data=data, options={}
    )
    behind = {name for name in tensors if name.startswith("vision_tower.encoder.layer.2.")}
    assert behind
    assert set(step.gradients) == set(tensors) - behind
    return model, folder, step


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_is_that_of_a_single_rank(
    single: tuple[VisionLanguageArchitecture, Path, Step], data: Batch, layout: Layout
) -> None:
    model, folder, expected = single
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)
