"""What a microbatch has for an image encoder, the encoder of most models here."""

from collections.abc import Callable, Sequence
from typing import Any

from loongplug.data.microbatch import Media, MediaInput, Microbatch, Share
from loongplug.data.planned_media import (
    EncoderUnits,
    LoadedUnit,
    MediaBatch,
    PlannedShare,
    PlannedUnit,
    UnitMedium,
)
from loongplug.data.sample import MediumExtent

ENCODER = "image_encoder"
KINDS = ("image", "video")


def unit_of(microbatch: Any) -> Any:
    """Its unit, planned or made."""
    return microbatch.units[ENCODER]


def media_of(microbatch: Microbatch) -> MediaInput:
    """Its media."""
    media: Media | None = unit_of(microbatch).media
    assert media is not None
    return media.taken()


def image_units(**options: Any) -> dict[str, EncoderUnits]:
    """How a source makes them; ``options`` are the encoder's."""
    return {ENCODER: EncoderUnits(kinds=KINDS, **options)}


def planned_whole(
    media: MediaBatch, load: Callable[[], LoadedUnit] | None, *, replica: int = 0
) -> PlannedUnit:
    """A unit that one replica encodes."""
    share = PlannedShare(share=Share(encoder_replica=replica), media=media, load=load)
    return PlannedUnit(media=media, shares=(share,))


def owner_of(unit: Any) -> int:
    """The one replica that encodes a unit, which is planned or made."""
    (share,) = unit.shares
    owner: int = getattr(share, "share", share).encoder_replica
    return owner


def media_batch(rows: Sequence[int], samples: Any) -> MediaBatch:
    """The unit of these samples, which are of these rows, not loaded."""
    extents = [each.extent for each in samples]
    return MediaBatch.of(0, rows, extents, encoder=ENCODER, kinds=KINDS)


def batch_of_extents(*extents: MediumExtent) -> MediaBatch:
    """A unit of the media of one row, which stand for samples of their own."""
    media = (UnitMedium(number, 0, number, extent) for number, extent in enumerate(extents))
    return MediaBatch(index=0, encoder=ENCODER, media=tuple(media))
