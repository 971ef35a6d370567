"""Global batches for the agreement tests of models that hear, some of which see as well."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from hf_batches import IMAGE, SEQ_LENGTH, VIDEO, VISION_END, VISION_START, VOCABULARY, Batch, Medium

from loongplug.data.audio_sizes import AudioSizes
from loongplug.data.microbatch import MediaInput, Microbatch, Unit

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

    def microbatch(self, first: int, size: int) -> Microbatch:
        chosen = self.samples[first : first + size]
        return Microbatch(
            input_ids=torch.cat([sample.input_ids for sample in chosen]),
            position_ids=torch.cat([sample.position_ids for sample in chosen], dim=1),
            labels=torch.cat([sample.labels for sample in chosen]),
            loss_mask=torch.cat([sample.loss_mask for sample in chosen]),
            tokens=sum(sample.tokens for sample in chosen),
            units={
                name: _joined([sample.units[name] for sample in chosen]) for name in chosen[0].units
            },
        )

    def unit(self, name: str) -> MediaInput:
        """All media of an encoder."""
        media = self.microbatch(0, len(self.samples)).units[name].media
        assert media is not None
        return media


def _joined(units: Sequence[Unit]) -> Unit:
    media = [unit.media for unit in units if unit.media is not None]
    return _unit(
        rows=torch.cat([each.rows for each in media]),
        grids=torch.cat([each.grids for each in media]),
        places=sum((unit.places for unit in units), ()),
    )


def _unit(*, rows: torch.Tensor, grids: torch.Tensor, places: tuple[np.ndarray, ...]) -> Unit:
    return Unit(
        grids=tuple((time, height, width) for time, height, width in grids.tolist()),
        places=places,
        media=MediaInput(rows=rows, grids=grids),
    )


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
    tokens, length = torch.tensor(ids), len(ids)
    seen = [each for each in media if isinstance(each, Medium)]
    padded = torch.full((SEQ_LENGTH,), 1)
    padded[:length] = tokens
    positions = torch.zeros(3, SEQ_LENGTH, dtype=torch.int64)
    positions[:, :length] = torch.from_numpy(senses.positions(tokens.numpy(), seen))
    mask = torch.zeros(SEQ_LENGTH)
    mask[length - 1 - answer : length - 1] = 1

    def unit(grids: Sequence[tuple[int, int, int]], *, values: int, ids: tuple[int, ...]) -> Unit:
        rows = sum(time * height * width for time, height, width in grids)
        return _unit(
            rows=torch.randn(rows, values, generator=generator),
            grids=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
            places=(np.isin(padded.numpy(), ids).nonzero()[0],),
        )

    sizes = senses.sizes
    sounds = [sizes.grid(each.frames) for each in media if isinstance(each, Sound)]
    units: Mapping[str, Unit] = {HEARS: unit(sounds, values=sizes.mel_bins, ids=(AUDIO,))}
    heard_here = units[HEARS].media
    assert heard_here is not None
    for part in heard_here.rows.split([grid[2] for grid in sounds]):
        part[sizes.longest :] = 0  # as loaded: the model's window ends there
    if senses.patch_values is not None:
        grids = [each.grid for each in seen]
        units = {SEES: unit(grids, values=senses.patch_values, ids=(IMAGE, VIDEO)), **units}
    return Microbatch(
        input_ids=padded[None],
        position_ids=positions[:, None],
        labels=F.pad(padded[1:], (0, 1), value=1)[None],
        loss_mask=mask[None],
        tokens=length,
        units=units,
    )


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
