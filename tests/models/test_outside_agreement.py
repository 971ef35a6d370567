"""A family from outside the package against transformers, as the built-in ones are held.

The package is ``outside/qwen2_vl``; nothing else knows of it.
"""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hf_reference
import pytest
from hf_batches import TOKEN_IDS, Batch, Medium, Style, batch, qwen3_positions
from hf_reference import Layout, Step, assert_agreement, reference_model, reference_step

from loongplug.models.architecture import ProjectorArchitecture, VisionLanguageArchitecture
from loongplug.models.hf_config import hf_config
from loongplug.models.registry import families, family_of

PACKAGE = "qwen2_vl"
LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, recompute=True),
    Layout(pp=2, vpp=2, micro_batch_size=2),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]
MEDIA = (  # images only: their positions are the same in all families
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((1, 4, 6)), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
)


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    """The package on the path, and trusted by the comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "outside"))
        trusting = partial(family_of, trusted_packages=[PACKAGE])
        patch.setattr(hf_reference, "family_of", trusting)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def architecture(*, tied: bool) -> VisionLanguageArchitecture:
    """Small, but with every feature: GQA, an uneven mRoPE, heads of another size than rows."""
    config = importlib.import_module(f"{PACKAGE}.config")
    model: VisionLanguageArchitecture = config.Qwen2VLConfig(
        image_encoder=config.Qwen2VisionConfig(
            num_layers=3, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4
        ),
        image_projector=ProjectorArchitecture(),
        foundation=config.Qwen2DecoderConfig(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=160,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            vocab_size=128,
            mrope_section=(2, 3, 3),
            tie_word_embeddings=tied,
        ),
        **TOKEN_IDS,
    )
    return model


@pytest.fixture(scope="module")
def data() -> Batch:
    style = Style(patch_values=3 * 2 * 14 * 14, frames_apart=False, positions=qwen3_positions)
    return batch(style, media=MEDIA)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(
    request: pytest.FixtureRequest, data: Batch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VisionLanguageArchitecture, Path, Step]:
    model = architecture(tied=request.param)
    theirs = reference_model(model)
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    expected = reference_step(theirs, data)
    return model, folder, by_file_names(expected)


def by_file_names(step: Step) -> Step:
    """Gradients by the names that transformers gives the tensors in a file."""

    def in_file(name: str) -> str:
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

    return dataclasses.replace(
        step, gradients={in_file(name): tensor for name, tensor in step.gradients.items()}
    )


def test_family_is_known_only_where_its_package_is_trusted() -> None:
    assert PACKAGE not in families()
    assert PACKAGE in families([PACKAGE])


def test_config_class_may_come_from_outside_transformers() -> None:
    model = architecture(tied=False)
    found = hf_reference.family_of(model).load_hugging_face(model)
    elsewhere = "transformers.models.qwen2_vl.configuration_qwen2_vl:Qwen2VLConfig"
    theirs = dataclasses.replace(found.in_transformers, config_class=elsewhere)
    moved = dataclasses.replace(found, in_transformers=theirs)
    assert hf_config(moved).to_dict() == hf_config(found).to_dict()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_outside_step_agrees_with_transformers(
    reference: tuple[VisionLanguageArchitecture, Path, Step], data: Batch, layout: Layout
) -> None:
    model, folder, expected = reference
    encoder = dataclasses.replace(model.image_encoder, recompute=layout.recompute)
    model = dataclasses.replace(model, image_encoder=encoder)
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)
