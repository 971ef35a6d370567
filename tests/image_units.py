"""What a microbatch has for an image encoder, the encoder of most models here."""

from collections.abc import Callable
from typing import Any

from loongplug.data.microbatch import Media, MediaInput, Microbatch, Share
from loongplug.data.source import EncoderUnits, PlannedShare, PlannedUnit
from loongplug.data.units import LoadedUnit, MediaBatch

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


def media_batch(index: int, samples: Any) -> MediaBatch:
    """The unit of these samples, not loaded."""
    return MediaBatch.of(index, samples, encoder=ENCODER, kinds=KINDS)
