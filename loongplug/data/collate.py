"""Samples into one microbatch: a padded batch, or a pack."""

from collections.abc import Sequence

import numpy as np
import torch

from loongplug.data.dataset import Sample
from loongplug.data.microbatch import Microbatch


def collate(
    samples: Sequence[Sample], *, pad_token_id: int, seq_length: int, packed: bool = False
) -> Microbatch:
    """Pad the samples' text parts to ``seq_length`` on the right; there is no vision part yet.

    Each sample has a row of its own, or, where they are ``packed``, all follow each other in one.
    Padding has position 0 and mask 0.
    """
    rows = [list(samples)] if packed else [[sample] for sample in samples]
    shape = (len(rows), seq_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, pad_token_id, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.float32)
    position_ids = np.zeros((3, *shape), dtype=np.int64)
    for row, members in enumerate(rows):
        start = 0
        for sample in members:
            end = start + len(sample.input_ids)
            assert end <= seq_length, (end, seq_length)
            input_ids[row, start:end] = sample.input_ids
            labels[row, start:end] = sample.labels
            loss_mask[row, start:end] = sample.loss_mask
            position_ids[:, row, start:end] = sample.position_ids
            start = end
    lengths = [len(sample.input_ids) for sample in samples]
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),  # [b, s]
        position_ids=torch.from_numpy(position_ids),  # [3, b, s]
        labels=torch.from_numpy(labels),  # [b, s]
        loss_mask=torch.from_numpy(loss_mask),  # [b, s]
        tokens=sum(lengths),
        vision=None,
        segments=tuple(length for length in lengths if length) if packed else None,
    )
