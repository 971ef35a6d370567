"""A family from outside the package against transformers, as the built-in ones are held.

The package is ``outside/qwen2_vl``; nothing else knows of it.
"""

import importlib
from collections.abc import Iterator

import pytest
from hf_batches import TOKEN_IDS, Medium, Style, batch, qwen3_positions
from hf_models import Layout, trusted
from hf_reference import Reference, assert_agrees, reference

from loongplug.models.architecture import ProjectorArchitecture, VisionLanguageArchitecture

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
    with trusted(PACKAGE):
        yield


def architecture() -> VisionLanguageArchitecture:
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
        ),
        **TOKEN_IDS,
    )
    return model


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    style = Style(patch_values=3 * 2 * 14 * 14, positions=qwen3_positions)
    data = batch(style, media=MEDIA)
    return reference(tmp_path_factory.mktemp("hf"), architecture(), data)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_outside_step_agrees_with_transformers(expected: Reference, layout: Layout) -> None:
    assert_agrees(expected, layout)
