"""Global batches for the agreement tests: text, images and videos in one sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from image_units import ENCODER, media_of, unit_of

from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.data.positions import Grid, mrope_position_ids

IMAGE, VIDEO, VISION_START, VISION_END = 5, 6, 3, 4
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


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a family writes its media: ``frames_apart`` puts text before each frame of a video.

    ``merge`` x ``merge`` patches become one token. With ``marks``, a token stands before a medium's
    tokens, and one behind them.
    """

    patch_values: int
    frames_apart: bool
    merge: int = 2
    marks: bool = True
    positions: Callable[[np.ndarray, Sequence[Medium]], np.ndarray]


def qwen3_positions(ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
    return mrope_position_ids(
        ids,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=[medium.grid for medium in media if not medium.is_video],
        video_grids=[medium.grid for medium in media if medium.is_video],
    )


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
            units=_units(chosen, places=sum((unit_of(each).places for each in chosen), ())),
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


def visual_places(input_ids: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Where each row of [b, s] has visual tokens."""
    return tuple(np.isin(row, (IMAGE, VIDEO)).nonzero()[0] for row in input_ids.numpy())


def _units(
    microbatches: Sequence[Microbatch], *, places: tuple[np.ndarray, ...]
) -> dict[str, Unit]:
    """One that has the media of all of these, one after the other."""
    media = [media_of(each) for each in microbatches]
    return _unit(
        rows=torch.cat([each.rows for each in media]),
        grids=torch.cat([each.grids for each in media]),
        places=places,
    )


def _unit(
    *, rows: torch.Tensor, grids: torch.Tensor, places: tuple[np.ndarray, ...]
) -> dict[str, Unit]:
    unit = Unit(
        grids=tuple((time, height, width) for time, height, width in grids.tolist()),
        places=places,
        media=MediaInput(rows=rows, grids=grids),
    )
    return {ENCODER: unit}


def _pack(samples: Sequence[Microbatch], *, seq_length: int) -> Microbatch:
    lengths = [sample.tokens for sample in samples]

    def joined(name: str, *, value: int) -> torch.Tensor:
        pieces = [
            getattr(sample, name)[..., :length]
            for sample, length in zip(samples, lengths, strict=True)
        ]
        return F.pad(torch.cat(pieces, dim=-1), (0, seq_length - sum(lengths)), value=value)

    return Microbatch(
        input_ids=joined("input_ids", value=1),
        position_ids=joined("position_ids", value=0),
        labels=joined("labels", value=1),
        loss_mask=joined("loss_mask", value=0),
        tokens=sum(lengths),
        units=_units(samples, places=visual_places(joined("input_ids", value=1))),
        segments=tuple(lengths),
    )


def batch(
    style: Style = QWEN3,
    *,
    media: Sequence[tuple[Medium, ...]] = MEDIA,
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
            token, (time, height, width) = VIDEO if medium.is_video else IMAGE, medium.grid
            frames = time if style.frames_apart else 1
            for frame in range(frames):
                ids += words(2) if frames > 1 and frame else []  # a timestamp
                visual = [token] * (time * height * width // style.merge**2 // frames)
                ids += [VISION_START, *visual, VISION_END] if style.marks else visual
        ids += words(7 + number)
        samples.append(_sample(ids, mine, answer=3 + number, style=style, generator=generator))
    return Batch(samples=tuple(samples), media=tuple(media))


def _sample(
    ids: list[int],
    media: Sequence[Medium],
    *,
    answer: int,
    style: Style,
    generator: torch.Generator,
) -> Microbatch:
    tokens = torch.tensor(ids)
    length = len(ids)
    padded = torch.full((SEQ_LENGTH,), 1)
    padded[:length] = tokens
    positions = torch.zeros(3, SEQ_LENGTH, dtype=torch.int64)
    positions[:, :length] = torch.from_numpy(style.positions(tokens.numpy(), media))
    mask = torch.zeros(SEQ_LENGTH)
    mask[length - 1 - answer : length - 1] = 1
    patches = sum(medium.patches for medium in media)
    return Microbatch(
        input_ids=padded[None],
        position_ids=positions[:, None],
        labels=F.pad(padded[1:], (0, 1), value=1)[None],
        loss_mask=mask[None],
        tokens=length,
        units=_unit(
            rows=torch.randn(patches, style.patch_values, generator=generator),
            grids=torch.tensor([medium.grid for medium in media], dtype=torch.int64).reshape(-1, 3),
            places=visual_places(padded[None]),
        ),
    )
