"""Loaders of one chunk that read here what they give, and microbatches that are the same."""

from typing import Any

import torch
from image_units import ENCODER, image_units, media_of

from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import Delivery, MicrobatchLoader
from loongplug.data.media_loader import coded_media
from loongplug.data.planned_media import PlannedUnit
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.training.delivery import ReplicaDelivery


def local_source(dataset: ChatDataset, *, micro_batch_size: int, **options: Any) -> LocalSource:
    """Of one rank's steps of one microbatch, in the rows' order; ``options`` say what else."""
    defaults = {"parts": {0: None}, "dp_size": 1, "seed": None, "encoders": image_units()} | options
    sizes = StepSizes.constant(micro_batch_size * defaults["dp_size"])
    return LocalSource(dataset, **{"sizes": sizes} | defaults, micro_batch_size=micro_batch_size)


def local_loader(
    dataset, *, micro_batch_size, dp_rank=0, dp_size=1, seed=None, with_images=True, **options
) -> MicrobatchLoader:
    """Of steps of one microbatch; ``options`` are the source's."""
    source = local_source(
        dataset,
        micro_batch_size=micro_batch_size,
        parts={dp_rank: None},
        dp_size=dp_size,
        seed=seed,
        encoders=image_units(loads=(0,) if with_images else ()),
        **options,
    )
    return MicrobatchLoader(
        source,
        processor=dataset.processor,
        seq_length=dataset.seq_length,
        token_ids={ENCODER: dataset.processor.places("image", "video")},
        packed="look_ahead" in options,
        deliveries={ENCODER: loaded_here(dataset)} if with_images else {},
    )


def loaded_here(dataset: ChatDataset, *, replica: int = 0) -> Delivery:
    """What this rank loads and encodes, a replica of its own: at once."""
    delivery = ReplicaDelivery(
        [(0,), (1,)],
        None,
        rank=replica,
        row_values=dataset.processor.vision.patch_dim,
        coded=coded_media(dataset.processor, dataset.videos),
        device=torch.device("cpu"),
        news=None,
    )

    def taken(planned: PlannedUnit) -> Any:
        media, heard = delivery(planned)
        return media and media.taken(), heard

    return taken


def require_alike(found: Any, expected: Any, *, media: bool = True) -> None:
    """Text, segments and, with ``media``, pixels are the same to the bit."""
    assert (found.tokens, found.segments) == (expected.tokens, expected.segments)
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    if media:
        assert torch.equal(media_of(found).rows, media_of(expected).rows)
        assert torch.equal(media_of(found).grids, media_of(expected).grids)
