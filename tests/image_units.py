"""What a microbatch has for an image encoder, the encoder of most models here."""

from typing import Any

from loongplug.data.microbatch import MediaInput, Microbatch
from loongplug.data.source import EncoderUnits
from loongplug.data.units import MediaBatch

ENCODER = "image_encoder"
KINDS = ("image", "video")


def unit_of(microbatch: Any) -> Any:
    """Its unit, planned or made."""
    return microbatch.units[ENCODER]


def media_of(microbatch: Microbatch) -> MediaInput:
    """Its media, which are there."""
    media: MediaInput | None = unit_of(microbatch).media
    assert media is not None
    return media


def image_units(**options: Any) -> dict[str, EncoderUnits]:
    """How a source makes them; ``options`` are the encoder's."""
    return {ENCODER: EncoderUnits(kinds=KINDS, **options)}


def media_batch(index: int, samples: Any) -> MediaBatch:
    """The unit of these samples, not loaded."""
    return MediaBatch.of(index, samples, encoder=ENCODER, kinds=KINDS)
