"""Loaders of one chunk that read here what they give, and microbatches that are the same."""

from collections.abc import Collection
from typing import Any

import torch
from image_units import ENCODER, image_units, media_of

from loongplug.data.assignment import PlannedShare, PlannedUnit
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import Delivery, Heard, MicrobatchLoader
from loongplug.data.media import coded_media
from loongplug.data.microbatch import MediaInput
from loongplug.data.source import LocalSource
from loongplug.data.step_sizes import StepSizes


def local_loader(
    dataset: ChatDataset,
    *,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    seed: int | None = None,
    with_images: bool = True,
    **options: Any,
) -> MicrobatchLoader:
    """Of steps of one microbatch; ``options`` are the source's."""
    source = LocalSource(
        dataset,
        **{"sizes": StepSizes.constant(micro_batch_size * dp_size), **options},
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        encoders=image_units(loads=(0,) if with_images else ()),
    )
    return MicrobatchLoader(
        source,
        processor=dataset.processor,
        seq_length=dataset.seq_length,
        token_ids={ENCODER: dataset.processor.visual_token_ids},
        packed="look_ahead" in options,
        deliveries={ENCODER: loaded_here(dataset)},
    )


def taken(share: PlannedShare, dataset: ChatDataset) -> tuple[MediaInput, Collection[int]]:
    """What this rank loads, as the encoder takes it: images come as bytes; and the bad samples."""
    coded: Any = coded_media(dataset.processor, dataset.videos)
    assert share.load is not None
    loaded, media = share.load(), share.media
    rows = coded.decoded(loaded.rows, media.extents) if media.coded else loaded.rows
    return media.to_come(lambda _: rows).taken(), loaded.bad


def loaded_here(dataset: ChatDataset) -> Delivery:
    """Of a rank that encodes all it loads: at once."""

    def delivered(planned: PlannedUnit) -> tuple[MediaInput | None, list[Heard]]:
        found = [taken(each, dataset) for each in planned.shares if each.load is not None]
        return (found[0][0], [lambda: found[0][1]]) if found else (None, [])

    return delivered


def require_alike(found: Any, expected: Any, *, media: bool = True) -> None:
    """Text, segments and, with ``media``, pixels are the same to the bit."""
    assert (found.tokens, found.segments) == (expected.tokens, expected.segments)
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    if media:
        assert torch.equal(media_of(found).rows, media_of(expected).rows)
        assert torch.equal(media_of(found).grids, media_of(expected).grids)
