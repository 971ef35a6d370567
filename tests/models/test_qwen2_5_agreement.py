"""Qwen2.5-VL's logits, loss and every gradient against transformers, in every layout.

Errors are measured as for Qwen3-VL. The images have several windows with ragged edges, and the
encoder has layers of both kinds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hf_batches import IMAGE, VIDEO, Batch, Medium, Style, batch
from hf_reference import Layout, Step, assert_agreement, reference_model, reference_step
from tiny_qwen2_5_vl import tiny_config

from loongplug.data.positions import mrope_position_ids

LAYOUTS = [
    Layout(),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]
TIED = [  # see test_hf_agreement.py
    Layout(tp=2, pp=2),
    Layout(pp=2, vpp=2, tp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]

MEDIA = (  # a window is 4 x 4 patches
    (Medium((1, 6, 10)), Medium((1, 2, 2))),
    (),
    (Medium((2, 6, 6), 1.5), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 8, 4)), Medium((1, 2, 4))),
    (),
    (Medium((3, 4, 6), 0.4),),
    (Medium((1, 6, 6)),),
    (Medium((1, 2, 2)), Medium((2, 6, 4), 2.0)),
)


def positions(ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
    """Ours; a video's frames are as far apart as the seconds between them."""
    style = tiny_config(tied=False).video_style()
    assert not style.timestamps
    return mrope_position_ids(
        ids,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=[medium.grid for medium in media if not medium.is_video],
        video_grids=[medium.grid for medium in media if medium.is_video],
        video_times=[
            style.times(medium.grid[0], fps=2 / medium.seconds, temporal_patch_size=2)
            for medium in media
            if medium.seconds is not None
        ],
    )


@pytest.fixture(scope="module")
def data() -> Batch:
    style = Style(patch_values=3 * 2 * 14 * 14, frames_apart=False, positions=positions)
    return batch(style, media=MEDIA)


@pytest.fixture(scope="module")
def untied(data, tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), data, tied=False)


@pytest.fixture(scope="module")
def tied(data, tmp_path_factory):
    return reference(tmp_path_factory.mktemp("hf"), data, tied=True)


def reference(folder, data, *, tied):
    model = tiny_config(tied=tied)
    theirs = reference_model(model)
    theirs.save_pretrained(folder)
    return model, folder, by_file_names(reference_step(theirs, data))


def by_file_names(step: Step) -> Step:
    """Gradients by the names that transformers gives the tensors in a file."""

    def in_file(name: str) -> str:
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

    return dataclasses.replace(
        step, gradients={in_file(name): tensor for name, tensor in step.gradients.items()}
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_qwen2_5_step_agrees_with_transformers(untied, data, layout):
    assert_agrees(untied, data, layout)


@pytest.mark.parametrize("layout", TIED, ids=str)
def test_qwen2_5_step_with_tied_embeddings_agrees_with_transformers(tied, data, layout):
    assert_agrees(tied, data, layout)


def assert_agrees(reference, data, layout):
    model, folder, expected = reference
    encoder = dataclasses.replace(model.image_encoder, recompute=layout.recompute)
    model = dataclasses.replace(model, image_encoder=encoder)
    assert_agreement(model, folder, layout=layout, data=data, expected=expected)
