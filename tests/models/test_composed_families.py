"""Parts of some families in another, which is data alone: built, loaded and trained in layouts."""

from collections.abc import Iterator

import pytest
from hf_batches import TOKEN_IDS, Medium, Style, batch, qwen3_positions
from hf_models import Layout, trusted
from hf_reference import Reference, assert_agrees, our_step
from ranks import run_ranks
from safetensors.torch import save_file
from tiny_families import QWEN2_5_VL, QWEN3_VL_MOE

from loongplug.models.registry import families, family_of
from loongplug.verify.weights import random_tensor

PACKAGE = "composed_vl"
MEDIA = (
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((1, 4, 6)), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
)
LAYOUTS = [Layout(tp=2, pp=2, sequence_parallel=True), Layout(dp=2, ep=2, micro_batch_size=2)]


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with trusted(PACKAGE):
        yield


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The family's step on one rank."""
    data = batch(Style(patch_values=3 * 2 * 14 * 14, positions=qwen3_positions), media=MEDIA)
    model = families([PACKAGE])[PACKAGE].config_class(
        image_encoder=QWEN2_5_VL.image_encoder,
        image_projector=QWEN2_5_VL.image_projector,
        foundation=QWEN3_VL_MOE.foundation,
        **TOKEN_IDS,
    )
    folder = tmp_path_factory.mktemp("weights")
    described = family_of(model, trusted_packages=[PACKAGE]).load_hugging_face(model)
    sources = [each for bundle in described.mapping.bundles() for each in bundle.sources]
    tensors = {each.name: random_tensor(each, seed=0) for each in sources}
    save_file(tensors, folder / "model.safetensors")
    given = {"folder": folder, "model": model, "layout": Layout(), "data": data}
    (step,) = run_ranks(our_step, 1, **given, options={})
    assert set(tensors) == set(step.gradients)  # none is left out of the composition
    return Reference(model, folder, data, step)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_is_that_of_a_single_rank(single: Reference, layout: Layout) -> None:
    assert_agrees(single, layout)
