"""Global batches for the agreement tests of models that hear, some of which see as well."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hf_batches import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Batch,
    Medium,
    drawn_unit,
    sample_of,
)

from loongplug.data.audio_sizes import AudioSizes
from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.data.positions import Grid

AUDIO, AUDIO_START, AUDIO_END = 7, 8, 9
HEARS, SEES = "audio_encoder", "image_encoder"
MERGED = 4  # patches of a visual token


@dataclass(frozen=True)
class Sound:
    """A sound of so many frames."""

    frames: int


@dataclass(frozen=True, kw_only=True)
class Senses:
    """What a model takes: ``sizes`` of sounds and, where it sees, values of a patch.

    ``marks``: a token stands before and one behind a sound.
    """

    sizes: AudioSizes
    patch_values: int | None = None
    marks: bool = False
    positions: Callable[[np.ndarray, Sequence[Medium]], np.ndarray]


@dataclass(frozen=True)
class HeardBatch(Batch):
    """A global batch whose samples have units for each of their encoders."""

    def unit(self, name: str) -> MediaInput:
        """All media of an encoder."""
        media = self.microbatch(0, len(self.samples)).units[name].media
        assert media is not None
        return media


def heard(
    media: Sequence[tuple[Sound | Medium, ...]], senses: Senses, *, seed: int = 1
) -> HeardBatch:
    """One sample for each entry of ``media``, of different lengths, with uneven loss masks."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(10, VOCABULARY, (count,), generator=generator).tolist()

    samples = []
    for number, mine in enumerate(media):
        ids: list[int] = []
        for medium in mine:
            ids += words(1 + number % 3)
            if isinstance(medium, Sound):
                tokens = [AUDIO] * senses.sizes.tokens(medium.frames)
                ids += [AUDIO_START, *tokens, AUDIO_END] if senses.marks else tokens
            else:
                token = VIDEO if medium.is_video else IMAGE
                ids += [VISION_START, *[token] * (medium.patches // MERGED), VISION_END]
        ids += words(7 + number)
        samples.append(_sample(ids, mine, answer=3 + number, senses=senses, generator=generator))
    seen = [tuple(each for each in mine if isinstance(each, Medium)) for mine in media]
    return HeardBatch(samples=tuple(samples), media=tuple(seen))


def _sample(
    ids: list[int],
    media: Sequence[Sound | Medium],
    *,
    answer: int,
    senses: Senses,
    generator: torch.Generator,
) -> Microbatch:
    sizes = senses.sizes
    seen = [each for each in media if isinstance(each, Medium)]
    sounds = [sizes.grid(each.frames) for each in media if isinstance(each, Sound)]

    def units(padded: torch.Tensor) -> dict[str, Unit]:
        def drawn(grids: Sequence[Grid], *, values: int, ids: tuple[int, ...]) -> Unit:
            places = (np.isin(padded.numpy(), ids).nonzero()[0],)
            return drawn_unit(grids, values=values, places=places, generator=generator)

        heard_here = drawn(sounds, values=sizes.mel_bins, ids=(AUDIO,))
        assert heard_here.media is not None
        for part in heard_here.media.rows.split([grid[2] for grid in sounds]):
            part[sizes.longest :] = 0  # as loaded: the model's window ends there
        if senses.patch_values is None:
            return {HEARS: heard_here}
        grids = [each.grid for each in seen]
        return {
            SEES: drawn(grids, values=senses.patch_values, ids=(IMAGE, VIDEO)),
            HEARS: heard_here,
        }

    positions = senses.positions(np.array(ids), seen)
    return sample_of(ids, positions=positions, answer=answer, units=units)


def feature_arguments(data: HeardBatch, sizes: AudioSizes) -> dict[str, torch.Tensor]:
    """What transformers takes of the batch's sounds.

    Behind a sound stand the rows that the model looks at, then some that it must not look at.
    """
    sounds = data.unit(HEARS)
    lengths = [sizes.frames((1, 1, count)) for count in sounds.grids[:, 2].tolist()]
    window = sizes.longest if sizes.behind else max(lengths)
    features = torch.full((len(lengths), window, sizes.mel_bins), 9.0)
    mask = torch.zeros(len(lengths), window, dtype=torch.int64)
    parts = sounds.rows.split(sounds.grids[:, 2].tolist())
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        features[number, : len(part)] = part[:window]
        mask[number, :length] = 1
    return {"input_features": features.transpose(1, 2), "feature_attention_mask": mask}
