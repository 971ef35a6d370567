"""Samples into one microbatch: a padded batch, or a pack."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loongplug.data.dataset import Sample
from loongplug.data.microbatch import ALL_TEXT, Microbatch, TextNeeds, VisionInput

_NOWHERE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def collate(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    seq_length: int,
    visual_token_ids: Sequence[int] = (),
    packed: bool = False,
    needs: TextNeeds = ALL_TEXT,
    vision: VisionInput | None = None,
    patches: int = 0,
    owner: int = 0,
    pins: bool = False,
) -> Microbatch:
    """Pad the samples' text parts to ``seq_length`` on the right, beside their images and videos.

    ``vision``, ``patches`` and ``owner`` are the microbatch's. With ``pins``, the text is in
    page-locked memory, once for all chunks that copy it.

    Each sample has a row of its own, or, where they are ``packed``, all follow each other in one.
    Padding has position 0 and mask 0. Only what ``needs`` names is made. Tokens with one of
    ``visual_token_ids`` hold the places of vision features.
    """
    rows = [list(samples)] if packed else [[sample] for sample in samples]
    shape = (len(rows), seq_length)
    spans = list(_spans(rows, seq_length=seq_length))

    def filled(wanted: bool, values: str, padding: int, dtype: type[np.generic]) -> Tensor | None:
        if not wanted:
            return None
        target: NDArray[np.generic] = np.full(shape, padding, dtype=dtype)
        for row, span, sample in spans:
            target[row, span] = getattr(sample, values)
        return placed(target)  # [b, s]

    def placed(values: NDArray[np.generic]) -> Tensor:
        made = torch.from_numpy(values)
        return made.pin_memory() if pins else made

    position_ids = np.zeros((3, *shape), dtype=np.int64)
    for row, span, sample in spans:
        position_ids[:, row, span] = sample.position_ids
    places: list[list[NDArray[np.int64]]] = [[] for _ in rows]
    for row, span, sample in spans:
        (found,) = np.isin(sample.input_ids, visual_token_ids).nonzero()
        places[row].append(found + span.start)
    lengths = [len(sample) for sample in samples]
    return Microbatch(
        input_ids=filled(needs.input_ids, "input_ids", pad_token_id, np.int64),
        position_ids=placed(position_ids),  # [3, b, s]
        labels=filled(needs.labels, "labels", pad_token_id, np.int64),
        loss_mask=filled(needs.loss_mask, "loss_mask", 0, np.float32),
        tokens=sum(lengths),
        vision=vision,
        segments=tuple(length for length in lengths if length) if packed else None,
        patches=patches,
        visual_places=tuple(np.concatenate([*row, _NOWHERE]) for row in places),
        owner=owner,
    )


def _spans(
    rows: Sequence[Sequence[Sample]], *, seq_length: int
) -> Iterator[tuple[int, slice, Sample]]:
    """Where each sample lies: its row, its tokens' places there."""
    for row, members in enumerate(rows):
        start = 0
        for sample in members:
            end = start + len(sample)
            assert end <= seq_length, (end, seq_length)
            yield row, slice(start, end), sample
            start = end
