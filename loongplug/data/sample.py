"""Samples: what a row becomes, or why it becomes none; its size, its media's places, positions."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from loongplug.data.object_store import DataSourceError

# row: no JSON, or no known schema. media: a file is missing, or its header says that it cannot be
# used. text: the chat template, its image tokens. length: longer than a sequence. pixels: the
# header is right, but what follows is damaged. masked: the row's own loss or weight leaves it out,
# which is no fault and ends no run.
BadKind = Literal["row", "media", "text", "length", "pixels", "masked"]
BAD_KINDS: tuple[BadKind, ...] = get_args(BadKind)

# What is odd about videos that are used all the same: of any such video, and of the one.
OddVideos = list[tuple[str, str]]

_LONGEST = 500  # characters of a message about one row
_LONG_WORD = re.compile(r"(?<=\s)(\S{40})\S{20,}(\S{30})")

Remark = tuple[str, str]  # its kind (key, mark, masked, video), and the key, the mark, what is odd
MASKED: Remark = ("masked", "")  # the row's own loss or weight leaves it out

MEDIA_KINDS = ("image", "video", "audio")  # indexes name a kind by its number here
Grid = tuple[int, int, int]  # time, height, width in patches
MAKE_AGAIN = "Make the index again with `loongplug data index`, or remove its *.lengths file."


@dataclass(frozen=True)
class BadSample:
    """Why a sample cannot be used; ``message`` says where it stands (``path:line``)."""

    kind: BadKind
    message: str

    def __post_init__(self) -> None:
        """Bound the message, which may quote the row: its long words, then its middle go."""
        if len(self.message) > _LONGEST:
            short = _LONG_WORD.sub(r"\1...\2", self.message)
            if len(short) > _LONGEST:
                short = f"{short[: _LONGEST - 205]} ... {short[-200:]}"
            object.__setattr__(self, "message", short)


class BadSampleError(ValueError):
    """A sample cannot be used; the message is that of ``sample``."""

    def __init__(self, sample: BadSample) -> None:
        super().__init__(sample.message)
        self.sample = sample


@contextmanager
def bad_as(kind: BadKind) -> Iterator[None]:
    """Makes a ValueError within a BadSampleError of this kind, but for one of no sample's fault."""
    try:
        yield
    except DataSourceError:
        raise
    except ValueError as error:
        raise BadSampleError(BadSample(kind, str(error))) from error


@contextmanager
def told(before: str, behind: str = "") -> Iterator[None]:
    """Has a ValueError within say where or of what it is, and perhaps what helps."""
    try:
        yield
    except DataSourceError:
        raise
    except ValueError as error:
        raise ValueError(f"{before}{error}{behind}") from error


class MediumExtent(NamedTuple):
    """What is known of a medium without its file.

    ``detail`` is what its header says beside the grid: of a sound its samples; of a video how many
    frames are taken and, of a file, how many there are, how many make a second, height and width.
    """

    kind: str  # as encoders' entries have it
    grid: Grid
    detail: tuple[float, ...] = ()


class MediaRun(NamedTuple):
    """Neighbours in a sample that hold places of media: their token, and which they are."""

    token: int
    begin: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RowExtent:
    """How large the sample is that a row becomes; without tokens, it cannot be used."""

    lengths: tuple[int, ...] = ()  # tokens of each of its renderings, which follow each other
    shown: tuple[int, ...] = ()  # how many of the row's media, from the first on, each has
    media: tuple[MediumExtent, ...] = ()  # of the row
    runs: tuple[MediaRun, ...] = ()
    trained: int = 0  # tokens that count
    answers: int = 0  # that are trained on

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the row's media that the sample has, in the order of their tokens."""
        return tuple(chain.from_iterable(map(range, self.shown)))


UNUSABLE = RowExtent()


def runs_of(ids: NDArray[np.int64], tokens: Sequence[int]) -> tuple[MediaRun, ...]:
    """The runs in ``ids`` [n] of tokens that hold places of media."""
    if not len(ids):
        return ()
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    ends = np.append(begins[1:], len(ids))
    found = zip(ids[begins].tolist(), begins.tolist(), (ends - begins).tolist(), strict=True)
    return tuple(MediaRun(*each) for each in found if each[0] in tokens)


def mrope_position_ids(
    input_ids: NDArray[np.int64],
    *,
    image_token_id: int | None,
    video_token_id: int | None,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    video_times: Sequence[NDArray[np.int64]] | None = None,
    after_times: bool = False,
    spatial_merge_size: int = 2,
) -> NDArray[np.int64]:
    """Position ids [3, n] for the tokens [n] of one sample without padding, as Qwen-VL's count.

    Text and sounds count on in all three. A picture's tokens lie on their merged grid, which starts
    where the text before it ended; what follows starts after the grid's longer side in height or
    width. Without ``video_times`` (Qwen3-VL), each frame of a video is a picture behind a timestamp
    in the text. With them (Qwen2.5-VL), a video is one picture, whose frames are at its times. With
    ``after_times`` (Qwen2.5-Omni), what follows starts after the last, too.

    Grids are in patches, in the order of their tokens. ValueError where tokens and grids differ.
    """
    merge = spatial_merge_size
    images = [_at_times(np.arange(time), high, wide, merge) for time, high, wide in image_grids]
    if video_times is None:
        once = np.zeros(1, dtype=np.int64)
        frames = ((high, wide) for time, high, wide in video_grids for _ in range(time))
        videos = [_at_times(once, high, wide, merge) for high, wide in frames]
    else:
        pairs = zip(video_times, video_grids, strict=True)
        videos = [_at_times(times, high, wide, merge) for times, (_, high, wide) in pairs]
    kinds = ((image_token_id, iter(images)), (video_token_id, iter(videos)))
    pictures = {token: each for token, each in kinds if token is not None}
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    token, position = 0, 0
    visual = np.flatnonzero(among(input_ids, pictures))
    while (at := int(visual.searchsorted(token))) < len(visual):  # the next outside of pictures
        start = int(visual[at])
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        kind = int(input_ids[start])
        if (picture := next(pictures[kind], None)) is None:
            raise ValueError(
                f"No grid for the picture at token {start}: give one grid for each picture."
            )
        token = start + picture.shape[1]
        found = np.count_nonzero(input_ids[start:token] == kind)
        if found != token - start:
            raise ValueError(
                f"The picture at token {start} has {found} tokens in the text, but its grid needs"
                f" {token - start}: write exactly as many."
            )
        np.add(picture, position, out=positions[:, start:token])
        position += int(picture[0 if after_times else 1 :, -1].max()) + 1  # the last is the largest
    positions[:, token:] = np.arange(position, position + len(input_ids) - token)
    for kind, rest in pictures.items():
        if left := len(list(rest)):
            raise ValueError(
                f"{left} more grids than pictures in the text for token {kind}: give one grid for"
                " each picture."
            )
    return positions


def plain_position_ids(tokens: int) -> NDArray[np.int64]:
    """Position ids [3, n] of a family that counts tokens alone: 0 to n - 1 in all three."""
    return np.broadcast_to(np.arange(tokens), (3, tokens)).copy()


def among(ids: NDArray[np.int64], few: Iterable[int]) -> NDArray[np.bool_]:
    """Where ``ids`` [n] are one of a ``few``, [n]; for a few in less time than np.isin."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for token in few:
        found |= ids == token
    return found


def _at_times(times: NDArray[np.int64], height: int, width: int, merge: int) -> NDArray[np.int64]:
    """Positions [3, tokens] of a picture, counted from 0, by its sides in patches."""
    grid = np.empty((3, len(times), height // merge, width // merge), dtype=np.int64)
    grid[0] = times[:, None, None]
    grid[1] = np.arange(height // merge)[:, None]
    grid[2] = np.arange(width // merge)
    return grid.reshape(3, -1)


@dataclass(frozen=True)
class Sample:
    """One row, tokenized and not padded; its media are known by their extents.

    Its renderings, mostly one, follow each other; each has its own positions and all media that it
    shows. ``labels[t]`` is the token that follows ``input_ids[t]``, and ``loss_mask[t]`` is 1 where
    that token counts. Nothing follows a rendering's last token: its label is itself, its mask 0.
    """

    input_ids: NDArray[np.int64]  # [n]
    labels: NDArray[np.int64]  # [n]
    loss_mask: NDArray[np.float32]  # [n]
    position_ids: NDArray[np.int64]  # [3, n]
    extent: RowExtent
    where: str  # path:line
    bad: BadSample | None = None  # why the sample cannot be used, and so has no tokens
    remarks: tuple[Remark, ...] = ()

    @classmethod
    def blank(cls, bad: BadSample | None = None) -> "Sample":
        """No tokens: what stands for a sample that cannot be used, or fills a microbatch up."""
        return cls.outline(UNUSABLE, bad=bad)

    @classmethod
    def outline(cls, extent: RowExtent, *, bad: BadSample | None = None) -> "Sample":
        """A sample without a text: of its tokens, those alone that hold places of media."""
        tokens = np.zeros(extent.tokens, dtype=np.int64)
        for run in extent.runs:
            tokens[run.begin : run.begin + run.length] = run.token
        return cls(
            input_ids=tokens,
            labels=tokens,
            loss_mask=np.zeros(len(tokens), dtype=np.float32),
            position_ids=np.zeros((3, len(tokens)), dtype=np.int64),
            extent=extent,
            where="",
            bad=bad,
        )

    def __len__(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    @property
    def nbytes(self) -> int:
        return sum(
            each.nbytes for each in (self.input_ids, self.labels, self.loss_mask, self.position_ids)
        )


def as_indexed(sample: Sample, extent: RowExtent) -> Sample:
    """The sample, if it is what its index says; of one that is gone, the room that it leaves."""
    if sample.bad is not None:
        return Sample.outline(extent, bad=sample.bad)
    found = sample.extent
    if (found.lengths, found.runs) != (extent.lengths, extent.runs):
        raise ValueError(
            f"{sample.where}: the sample has {found.tokens} tokens, but {extent.tokens} by the"
            " index (0: it could not be used), or media at other places: the row, or what reads"
            f" it, has changed since. {MAKE_AGAIN}"
        )
    return sample
