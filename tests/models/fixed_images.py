"""Models that take images of one size, against transformers: what their tests share.

Patches are of 2 x 2 pixels.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_batches import VOCABULARY, Batch, Medium, Style, batch
from hf_reference import (
    Layout,
    Step,
    assert_agreement,
    expert_by_expert,
    reference_model,
    reference_step,
)
from image_units import media_of
from safetensors.torch import load_file

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.hf_mapping import is_carried
from loongplug.models.registry import family_of

PATCH = 2
TOWER_KEY = re.compile(r"^(vision_tower\..*\.)(k_proj|key)(\.bias)$")
KINDS = {"k_proj": ("q_proj", "k_proj", "v_proj"), "key": ("query", "key", "value")}

# Sizes of small decoders of text.
TEXT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 112,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": VOCABULARY,
    "rotary_base": 10_000.0,
    "max_position_embeddings": 512,
}

Reference = tuple[VisionLanguageArchitecture, Path, Step]


def plain(ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
    return np.tile(np.arange(len(ids)), (3, 1))


def pictures_of(media: Sequence[tuple[Medium, ...]], *, merge: int = 1) -> Batch:
    style = Style(
        patch_values=3 * PATCH**2, frames_apart=False, merge=merge, marks=False, positions=plain
    )
    return batch(style, media=media)


def whole_images(data: Batch, *, merge: int) -> torch.Tensor:
    """What transformers takes: whole images [images, 3, height, width], made of our patches."""
    vision = media_of(data.microbatch(0, len(data.samples)))
    frames, side, _ = vision.grids.sum(0)[0].item(), *vision.grids[0, 1:].tolist()
    images = torch.empty(frames, 3, side * PATCH, side * PATCH)
    patches = iter(vision.rows)
    for image in images:
        for block_row in range(0, side, merge):
            for block_column in range(0, side, merge):
                for row in range(block_row, block_row + merge):
                    for column in range(block_column, block_column + merge):
                        down, right = PATCH * row, PATCH * column
                        values = next(patches).view(3, PATCH, PATCH)
                        image[:, down : down + PATCH, right : right + PATCH] = values
    return images


def reference(
    folder: Path, model: VisionLanguageArchitecture, data: Batch, *, merge: int = 1
) -> Reference:
    """The model, its files, and a step of it in transformers."""
    theirs = reference_model(model)
    theirs.save_pretrained(folder)
    images = {"pixel_values": whole_images(data, merge=merge)}
    step = reference_step(theirs, data, arguments=lambda data, ids: images)
    gradients = as_saved(theirs, folder / "gradients")
    # The last layer's and the pooling's are not part of the loss, and have no gradient.
    rows = family_of(model).load_hugging_face(model).mapping.rows
    carried = {row.sources[0].name for row in rows if is_carried(row.names[0])}
    assert carried == load_file(folder / "model.safetensors").keys() - gradients.keys()
    return model, folder, dataclasses.replace(step, gradients=gradients)


def as_saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients by the names, and in the shapes, that transformers gives tensors in its files.

    It saves them as if they were weights; what has none is NaN there, and left out.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            grad = torch.tensor(torch.nan) if parameter.grad is None else parameter.grad
            parameter.copy_(grad)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    return {name: each for name, each in saved.items() if not each.isnan().all()}


def with_biases_together(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tower's q, k and v biases in one: alone, a key's changes no output where nothing turns it,
    so that its gradient is noise.
    """
    split = expert_by_expert(gradients)
    for name in [name for name in split if TOWER_KEY.search(name)]:
        apart = [TOWER_KEY.sub(rf"\g<1>{kind}\g<3>", name) for kind in KINDS[name.split(".")[-2]]]
        split[f"{name} and others"] = torch.stack([split.pop(each) for each in apart])
    return split


def assert_agrees(reference: Reference, data: Batch, layout: Layout) -> None:
    model, folder, expected = reference
    assert_agreement(
        model,
        folder,
        layout=layout,
        data=data,
        expected=expected,
        measured=with_biases_together,
    )
