"""Global batches for the agreement tests: text, images, videos and sounds in one sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from image_units import ENCODER, unit_of

from loongplug.data.media_sizes import AudioSizes
from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.data.sample import Grid, mrope_position_ids
from loongplug.data.video import VideoStyle

IMAGE, VIDEO, VISION_START, VISION_END = 5, 6, 3, 4
AUDIO, AUDIO_START, AUDIO_END = 7, 8, 9
HEARS = "audio_encoder"
TOKEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
SEQ_LENGTH = 48
VOCABULARY = 128


@dataclass(frozen=True)
class Medium:
    """An image, or a video with the seconds from one temporal patch to the next."""

    grid: Grid  # time, height, width in patches
    seconds: float | None = None

    @property
    def is_video(self) -> bool:
        return self.seconds is not None

    @property
    def patches(self) -> int:
        time, height, width = self.grid
        return time * height * width


@dataclass(frozen=True)
class Sound:
    """A sound of so many frames."""

    frames: int


Positions = Callable[[np.ndarray, Sequence[Medium]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a family writes its media: ``frames_apart`` puts text before each frame of a video.

    ``patch_values``: values of a patch, where the model sees; ``sizes`` of sounds, where it hears.
    ``merge`` x ``merge`` patches become one token. With ``marks``, a token stands before a medium's
    tokens, and one behind them.
    """

    patch_values: int | None = None
    sizes: AudioSizes | None = None
    frames_apart: bool = False
    merge: int = 2
    marks: bool = True
    positions: Positions

    def words_of(self, medium: "Medium | Sound", words: Callable[[int], list[int]]) -> list[int]:
        """The medium's tokens in the text."""
        if isinstance(medium, Sound):
            assert self.sizes is not None
            token, start, end = AUDIO, AUDIO_START, AUDIO_END
            counts = [self.sizes.tokens(medium.frames)]
        else:
            token, start, end = VIDEO if medium.is_video else IMAGE, VISION_START, VISION_END
            frames = medium.grid[0] if self.frames_apart else 1
            counts = [medium.patches // self.merge**2 // frames] * frames
        ids: list[int] = []
        for number, count in enumerate(counts):
            ids += words(2) if number else []  # a timestamp
            ids += [start, *[token] * count, end] if self.marks else [token] * count
        return ids

    def units(
        self, ids: np.ndarray, media: Sequence["Medium | Sound"], generator: torch.Generator
    ) -> dict[str, Unit]:
        """A padded sample's, with random values."""

        def drawn(grids: Sequence[Grid], *, values: int, tokens: tuple[int, ...]) -> Unit:
            return _unit(
                rows=torch.randn(sum(map(prod, grids)), values, generator=generator),
                grids=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
                places=(np.isin(ids, tokens).nonzero()[0],),
            )

        made = {}
        if self.patch_values is not None:
            grids = [each.grid for each in seen(media)]
            made[ENCODER] = drawn(grids, values=self.patch_values, tokens=(IMAGE, VIDEO))
        if (sizes := self.sizes) is not None:
            grids = [sizes.grid(each.frames) for each in media if isinstance(each, Sound)]
            made[HEARS] = drawn(grids, values=sizes.mel_bins, tokens=(AUDIO,))
            assert made[HEARS].media is not None
            for part in made[HEARS].media.rows.split([grid[2] for grid in grids]):
                part[sizes.longest :] = 0  # as loaded: the model's window ends there
        return made


def seen(media: Iterable[Medium | Sound]) -> tuple[Medium, ...]:
    """What of them is no sound."""
    return tuple(each for each in media if isinstance(each, Medium))


def plain_positions(ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
    return np.tile(np.arange(len(ids)), (3, 1))


def qwen3_positions(ids: np.ndarray, media: Sequence[Medium], **more: Any) -> np.ndarray:
    return mrope_position_ids(
        ids,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=[medium.grid for medium in media if not medium.is_video],
        video_grids=[medium.grid for medium in media if medium.is_video],
        **more,
    )


def timed_positions(style: VideoStyle, *, after_times: bool = False) -> Positions:
    """Ours where a video's frames are as far apart as the seconds between them."""
    assert not style.timestamps

    def positions(ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
        times = [
            style.times(medium.grid[0], fps=2 / medium.seconds, temporal_patch_size=2)
            for medium in media
            if medium.seconds is not None
        ]
        return qwen3_positions(ids, media, video_times=times, after_times=after_times)

    return positions


QWEN3 = Style(patch_values=3 * 2 * 16 * 16, frames_apart=True, positions=qwen3_positions)

MEDIA: tuple[tuple[Medium, ...], ...] = (  # none to three, of different sizes
    (Medium((1, 2, 2)), Medium((1, 4, 4))),
    (),
    (Medium((2, 2, 4), 1.5), Medium((1, 2, 6))),
    (Medium((1, 4, 2)), Medium((1, 2, 2)), Medium((1, 2, 4))),
    (),
    (Medium((3, 4, 2), 0.5),),
    (Medium((1, 6, 4)),),
    (Medium((1, 2, 2)), Medium((2, 2, 2), 2.0)),
)


@dataclass(frozen=True)
class Batch:
    """A global batch, sample by sample."""

    samples: tuple[Microbatch, ...]  # one sample each
    media: tuple[tuple[Medium, ...], ...]

    @property
    def seq_length(self) -> int:
        return self.samples[0].input_ids.shape[1]

    def microbatch(self, first: int, size: int) -> Microbatch:
        """Samples ``first`` to ``first + size`` as one microbatch."""
        chosen = self.samples[first : first + size]
        return Microbatch(
            input_ids=torch.cat([sample.input_ids for sample in chosen]),
            position_ids=torch.cat([sample.position_ids for sample in chosen], dim=1),
            labels=torch.cat([sample.labels for sample in chosen]),
            loss_mask=torch.cat([sample.loss_mask for sample in chosen]),
            tokens=sum(sample.tokens for sample in chosen),
            units={name: joined([each.units[name] for each in chosen]) for name in chosen[0].units},
        )


class Packs(Batch):
    """A global batch of packs: what takes the place of a sample is a pack."""

    def microbatch(self, first: int, size: int) -> Microbatch:
        assert size == 1
        return self.samples[first]


def packed(data: Batch, packs: Sequence[tuple[int, ...]], *, seq_length: int) -> Packs:
    """The samples of ``data`` by number, several to a row of ``seq_length``."""
    return Packs(
        samples=tuple(
            _pack([data.samples[number] for number in numbers], seq_length=seq_length)
            for numbers in packs
        ),
        media=tuple(
            tuple(m for number in numbers for m in data.media[number]) for numbers in packs
        ),
    )


def joined(units: Sequence[Unit]) -> Unit:
    """One that has the media of all of these, one after the other."""
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
        media=MediaInput(loaded=rows, grids=grids),
    )


def _pack(samples: Sequence[Microbatch], *, seq_length: int) -> Microbatch:
    lengths = [sample.tokens for sample in samples]

    def behind(name: str, *, value: int) -> torch.Tensor:
        pieces = [
            getattr(sample, name)[..., :length]
            for sample, length in zip(samples, lengths, strict=True)
        ]
        return F.pad(torch.cat(pieces, dim=-1), (0, seq_length - sum(lengths)), value=value)

    input_ids = behind("input_ids", value=1)
    unit = joined([unit_of(sample) for sample in samples])
    places = (np.isin(input_ids.numpy()[0], (IMAGE, VIDEO)).nonzero()[0],)
    return Microbatch(
        input_ids=input_ids,
        position_ids=behind("position_ids", value=0),
        labels=behind("labels", value=1),
        loss_mask=behind("loss_mask", value=0),
        tokens=sum(lengths),
        units={ENCODER: replace(unit, places=places)},
        segments=tuple(lengths),
    )


def batch(
    style: Style = QWEN3,
    *,
    media: Sequence[tuple[Medium | Sound, ...]] = MEDIA,
    seed: int = 1,
) -> Batch:
    """One sample for each entry of ``media``, of different lengths, with uneven loss masks."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(10, VOCABULARY, (count,), generator=generator).tolist()

    samples = []
    for number, mine in enumerate(media):
        ids: list[int] = []
        for medium in mine:
            ids += words(1 + number % 3)
            ids += style.words_of(medium, words)
        ids += words(7 + number)
        positions = style.positions(np.array(ids), seen(mine))
        sample = _sample(ids, positions=positions, answer=3 + number)
        units = style.units(sample.input_ids.numpy()[0], mine, generator)
        samples.append(replace(sample, units=units))
    return Batch(samples=tuple(samples), media=tuple(map(seen, media)))


def _sample(ids: Sequence[int], *, positions: np.ndarray, answer: int) -> Microbatch:
    """A padded sample without media, whose last tokens are its answer."""
    length = len(ids)
    padded = torch.full((SEQ_LENGTH,), 1)
    padded[:length] = torch.tensor(ids)
    position_ids = torch.zeros(3, SEQ_LENGTH, dtype=torch.int64)
    position_ids[:, :length] = torch.from_numpy(positions)
    mask = torch.zeros(SEQ_LENGTH)
    mask[length - 1 - answer : length - 1] = 1
    return Microbatch(
        input_ids=padded[None],
        position_ids=position_ids[:, None],
        labels=F.pad(padded[1:], (0, 1), value=1)[None],
        loss_mask=mask[None],
        tokens=length,
        units={},
    )
