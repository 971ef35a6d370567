"""Samples: what a row of a JSONL file becomes before it is put into a microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.bad_samples import BadSample, BadSampleError, bad_as
from loongplug.data.blend import Rows, Source, sources_of
from loongplug.data.cache import ByteBoundedCache
from loongplug.data.conversation import Conversation, Medium, Video, VideoClip
from loongplug.data.formats import parse_conversation
from loongplug.data.jsonl import JsonlIndex
from loongplug.data.kept_files import ChangedFileError
from loongplug.data.kinds import each_of, kind_of, medium_grid, open_medium, placeholder
from loongplug.data.media_files import InlineFile, MediaFile
from loongplug.data.object_store import StoreError
from loongplug.data.positions import Grid, mrope_position_ids, plain_position_ids
from loongplug.data.processor import Processor
from loongplug.data.remarks import MASKED, Remark
from loongplug.data.template import Tokens, TrainingPhase, shortest_sample, tokenize_conversation
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle


@dataclass(frozen=True)
class Sample:
    """One row, tokenized and not padded; its media are named, not loaded.

    Its renderings, mostly one, follow each other; each has its own positions and all media that it
    shows. ``labels[t]`` is the token that follows ``input_ids[t]``, and ``loss_mask[t]`` is 1 where
    that token counts. Nothing follows a rendering's last token: its label is itself, its mask 0.
    """

    input_ids: NDArray[np.int64]  # [n]
    labels: NDArray[np.int64]  # [n]
    loss_mask: NDArray[np.float32]  # [n]
    position_ids: NDArray[np.int64]  # [3, n]
    media: tuple[Medium, ...]  # in the order of their tokens
    grids: tuple[Grid, ...]  # of each medium
    where: str  # path:line
    lengths: tuple[int, ...] = ()  # tokens of each rendering; none: there is one
    bad: BadSample | None = None  # why the sample cannot be used, and so has no tokens
    remarks: tuple[Remark, ...] = ()

    @classmethod
    def blank(cls, bad: BadSample | None = None) -> "Sample":
        """No tokens: what stands for a sample that cannot be used, or fills a microbatch up."""
        tokens = np.zeros(0, dtype=np.int64)
        return cls(
            input_ids=tokens,
            labels=tokens,
            loss_mask=np.zeros(0, dtype=np.float32),
            position_ids=np.zeros((3, 0), dtype=np.int64),
            media=(),
            grids=(),
            where="",
            bad=bad,
        )

    def __len__(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    def untrained(self) -> "Sample":
        """The same sample with no token that counts."""
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and of images and sounds that stand in the row."""
        arrays = (self.input_ids, self.labels, self.loss_mask, self.position_ids)
        files = (file for medium in self.media for file in kind_of(medium).files(medium))
        inline = (len(file.content) for file in files if isinstance(file, InlineFile))
        return sum(array.nbytes for array in arrays) + sum(inline)


class ChatDataset:
    """Rows (those of a JSONL file, or of a blend) as samples, by index, with a bounded cache.

    Reads headers of media only: a sample's text, labels and positions come out the same on every
    rank, whether that rank loads the images or not. ``video_style`` is the model family's, and
    ``plain_positions`` whether it counts tokens alone. ``video_fps`` is how many frames to take per
    second of video files whose row does not say.
    """

    def __init__(
        self,
        rows: str | Path | Rows,
        *,
        processor: Processor,
        seq_length: int,
        training_phase: TrainingPhase,
        video_style: VideoStyle = TIMESTAMPS,
        plain_positions: bool = False,
        video_fps: float | None = None,
        cache_bytes: int = 64 * 2**20,
    ) -> None:
        if seq_length < (least := shortest_sample(processor)):
            raise ValueError(
                f"--seq-length {seq_length} is too small: the chat template alone takes {least}"
                " tokens for a question and an answer that say nothing."
            )
        self.processor = processor
        self.seq_length = seq_length
        self.training_phase = training_phase
        self._plain_positions = plain_positions
        self.videos = VideoProcessor(processor, video_style, fps=video_fps)
        self.rows = JsonlIndex(rows) if isinstance(rows, str | Path) else rows
        self._cache_bytes = cache_bytes
        self._cache: ByteBoundedCache[int, Sample] = ByteBoundedCache(cache_bytes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Raises BadSampleError with the row's place for a row that cannot be used."""
        sample = self._cache.get(index)
        if sample is None:
            sample = self._make(index)
            self._cache.put(index, sample, size=sample.nbytes)
        return sample

    def text_parts(self, indices: Sequence[int]) -> list[Sample]:
        """The samples; those that cannot be used are blank and say why."""
        parts: list[Sample] = []
        for index in indices:
            try:
                parts.append(self[index])
            except BadSampleError as error:
                parts.append(Sample.blank(error.sample))
            except ChangedFileError:
                raise  # alike for each row and rank
            except StoreError as error:
                raise ValueError(f"{self.rows.where(index)}: {error}") from error
            except Exception as error:  # no fault of the row, but it helps to know which
                where = self.rows.where(index)
                raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        return parts

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files and datasets that the rows come from."""
        return sources_of(self.rows)

    def share_cache(self, processes: int) -> None:
        """Keep only so much that this many processes together keep what one would."""
        self._cache = ByteBoundedCache(self._cache_bytes // processes)

    def _make(self, index: int) -> Sample:
        made = tokenize_row(
            self.rows, index, self.processor, videos=self.videos, phase=self.training_phase
        )
        where, tokens = self.rows.where(index), made.tokens
        require_length(*tokens.lengths, where=where, seq_length=self.seq_length)
        ends = np.cumsum(tokens.lengths)
        labels, mask = np.roll(tokens.ids, -1), np.roll(tokens.trained, -1)
        labels[ends - 1], mask[ends - 1] = tokens.ids[ends - 1], False
        parts = zip(np.split(tokens.ids, ends[:-1]), made.media, made.grids, strict=True)
        return Sample(
            input_ids=tokens.ids,
            labels=labels,
            loss_mask=mask.astype(np.float32),
            position_ids=np.concatenate([self.positions(*part) for part in parts], axis=-1),
            media=tuple(chain(*made.media)),
            grids=tuple(chain(*made.grids)),
            where=where,
            remarks=made.remarks,
            lengths=tokens.lengths,
        )

    def positions(
        self, ids: NDArray[np.int64], media: Sequence[Medium], grids: Sequence[Grid]
    ) -> NDArray[np.int64]:
        """Of tokens [n] with these media: time, height, width, [3, n] int64."""
        if self._plain_positions or self.processor.images is None:
            return plain_position_ids(len(ids))
        vision, style, tokens = self.processor.vision, self.videos.style, self.processor.token_ids
        pairs = list(zip(media, grids, strict=True))
        videos = [(each, grid) for each, grid in pairs if isinstance(each, Video | VideoClip)]
        times = [
            style.times(grid[0], fps=video.fps, temporal_patch_size=vision.temporal_patch_size)
            for video, grid in videos
        ]
        return mrope_position_ids(
            ids,
            image_token_id=tokens.get("image_token_id"),
            video_token_id=tokens.get("video_token_id"),
            image_grids=[grid for medium, grid in pairs if isinstance(medium, MediaFile)],
            video_grids=[grid for _, grid in videos],
            video_times=None if style.timestamps else times,
            after_times=style.as_sounds,
            spatial_merge_size=vision.spatial_merge_size,
        )


@dataclass(frozen=True)
class TokenizedRow:
    """A row's tokens, however many, and its media, of which headers were read."""

    tokens: Tokens
    media: tuple[tuple[Medium, ...], ...]  # of each rendering, in the order of their tokens
    grids: tuple[tuple[Grid, ...], ...]  # of each medium
    remarks: tuple[Remark, ...]


def tokenize_row(
    rows: Rows, index: int, processor: Processor, *, videos: VideoProcessor, phase: TrainingPhase
) -> TokenizedRow:
    """What training would make of a row; BadSampleError for one that cannot be used."""
    where = rows.where(index)
    with bad_as("row"):
        conversation = parse_conversation(
            rows.read(index), where=where, ignored=rows.access.ignored
        )
    if MASKED in conversation.remarks:
        raise BadSampleError(BadSample("masked", f"{where}: left out by its loss or weight."))
    with bad_as("media"):
        media = tuple(
            open_medium(medium, processor, videos=videos, where=where)
            for medium in conversation.media(rows.media_root(index))
        )
        grid_of = partial(medium_grid, processor=processor, videos=videos, where=where)
        grids = tuple(each_of(grid_of, media))
    tokens = tokenize_sample(
        conversation, processor, media=media, grids=grids, videos=videos, phase=phase
    )
    return TokenizedRow(
        tokens,
        tuple(media[:shown] for shown in tokens.media),
        tuple(grids[:shown] for shown in tokens.media),
        conversation.remarks,
    )


def tokenize_sample(
    conversation: Conversation,
    processor: Processor,
    *,
    media: Sequence[Medium],
    grids: Sequence[Grid],
    videos: VideoProcessor,
    phase: TrainingPhase,
) -> Tokens:
    """The tokens of a row, however many; BadSampleError for a text that cannot be used."""
    with bad_as("text"):
        return tokenize_conversation(
            conversation,
            processor,
            phase=phase,
            placeholders=[
                placeholder(medium, grid, processor, videos=videos)
                for medium, grid in zip(media, grids, strict=True)
            ],
        )


def require_length(*renderings: int, where: str, seq_length: int) -> None:
    """BadSampleError for a sample whose renderings have more tokens than a sequence."""
    with bad_as("length"):
        if (tokens := sum(renderings)) > seq_length:
            turns = cure = ""
            if len(renderings) > 1:
                turns = f" in {len(renderings)} renderings of its turns"
                cure = "give --multi-turn last, "
            raise ValueError(
                f"{where}: the sample has {tokens} tokens{turns}, but --seq-length is {seq_length}:"
                f" raise it, {cure}or shorten or drop the sample."
            )
