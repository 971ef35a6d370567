"""Samples into one microbatch."""

from collections.abc import Sequence

import numpy as np
import torch

from loongplug.data.dataset import Sample
from loongplug.data.media import MediaLoader
from loongplug.data.microbatch import Microbatch, VisionInput


def collate(
    samples: Sequence[Sample], *, pad_token_id: int, seq_length: int, media: MediaLoader | None
) -> Microbatch:
    """Pad the samples on the right to ``seq_length`` and load their images and videos.

    Padding has position 0 and mask 0. Without a media loader, no image file is opened and the
    microbatch's vision is None.
    """
    shape = (len(samples), seq_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, pad_token_id, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.float32)
    position_ids = np.zeros((3, *shape), dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = sample.input_ids
        labels[row, :length] = sample.labels
        loss_mask[row, :length] = sample.loss_mask
        position_ids[:, row, :length] = sample.position_ids
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),  # [b, s]
        position_ids=torch.from_numpy(position_ids),  # [3, b, s]
        labels=torch.from_numpy(labels),  # [b, s]
        loss_mask=torch.from_numpy(loss_mask),  # [b, s]
        tokens=sum(len(sample.input_ids) for sample in samples),
        vision=None if media is None else _vision(samples, media),
    )


def _vision(samples: Sequence[Sample], loader: MediaLoader) -> VisionInput:
    media = [medium for sample in samples for medium in sample.media]
    where = ", ".join(sample.where for sample in samples)
    vision = loader.load(media, where=where)
    grids = [list(grid) for sample in samples for grid in sample.grids]
    if vision.grid_thw.tolist() != grids:
        raise ValueError(
            f"{where}: the images and videos have patch grids {vision.grid_thw.tolist()}, but the"
            f" text was written for {grids}: do not change image files while they are in use."
        )
    return vision
