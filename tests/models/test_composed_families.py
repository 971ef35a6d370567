"""Parts of two families in a third, which is data alone: built, loaded and trained in layouts."""

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
from tiny_qwen2_5_vl import tiny_config
from tiny_qwen3_vl_moe import architecture as tiny_moe

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.registry import families, family_of
from loongplug.verify.weights import random_tensor

PACKAGE = "composed_vl"
MEDIA = (
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((1, 4, 6)), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
)
LAYOUTS = [
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(dp=2, ep=2, micro_batch_size=2),
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
    style = Style(patch_values=3 * 2 * 14 * 14, frames_apart=False, positions=qwen3_positions)
    return batch(style, media=MEDIA)


@pytest.fixture(scope="module")
def single(
    data: Batch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VisionLanguageArchitecture, Path, Step]:
    """The model, its weights, and its step on one rank."""
    vision, text = tiny_config(tied=False), tiny_moe()
    model: VisionLanguageArchitecture = importlib.import_module(PACKAGE).ComposedConfig(
        image_encoder=vision.image_encoder,
        image_projector=vision.image_projector,
        foundation=text.foundation,
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
    # All tensors of both families' parts have a gradient: none is left out of the composition.
    assert set(step.gradients) == set(tensors)
    return model, folder, step


def test_parts_are_those_of_the_other_families() -> None:
    known = families([PACKAGE])
    joined = known[PACKAGE].joined
    assert joined["image_encoder"] == known["qwen2_5_vl"].joined["image_encoder"]
    assert joined["text_decoder"] == known["qwen3_vl_moe"].joined["text_decoder"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_is_that_of_a_single_rank(
    single: tuple[VisionLanguageArchitecture, Path, Step], data: Batch, layout: Layout
) -> None:
    model, folder, expected = single
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)
