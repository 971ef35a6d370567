"""Samples: what a row of a JSONL file becomes before it is put into a microbatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.bad_samples import BadSample, BadSampleError
from loongplug.data.blend import Rows, Source, sources_of
from loongplug.data.cache import ByteBoundedCache
from loongplug.data.conversation import Medium, Video, VideoClip
from loongplug.data.extent_index import IndexedExtents
from loongplug.data.extents import UNUSABLE, MediumExtent, RowExtent
from loongplug.data.jsonl import JsonlIndex
from loongplug.data.kept_files import ChangedFileError
from loongplug.data.object_store import StoreError
from loongplug.data.positions import mrope_position_ids, plain_position_ids
from loongplug.data.processor import Processor
from loongplug.data.remarks import Remark
from loongplug.data.survey import Surveyor
from loongplug.data.template import TrainingPhase, shortest_sample
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle


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
        """Bytes of the arrays."""
        return sum(
            each.nbytes for each in (self.input_ids, self.labels, self.loss_mask, self.position_ids)
        )


class ChatDataset:
    """Rows (those of a JSONL file, or of a blend) as samples, by index, with a bounded cache.

    Reads headers of media only, and none of rows whose ``extents`` are known: a sample's text,
    labels and positions come out the same on every rank, whether that rank loads the images or not.
    ``video_style`` is the model family's, and ``plain_positions`` whether it counts tokens alone.
    ``video_fps`` is how many frames to take per second of video files whose row does not say.
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
        self._plain_positions = plain_positions
        self.videos = VideoProcessor(processor, video_style, fps=video_fps)
        self.surveyor = Surveyor(
            processor, videos=self.videos, phase=training_phase, seq_length=seq_length
        )
        self.rows = JsonlIndex(rows) if isinstance(rows, str | Path) else rows
        self.extents: IndexedExtents | None = None
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

    def media(self, index: int, known: Mapping[int, MediumExtent]) -> dict[int, Medium]:
        """Those of a row's media whose extents are ``known``, by their numbers; opens no header."""
        conversation = self.surveyor.conversation(self.rows, index)
        return self.surveyor.known_media(conversation, self.rows, index, known)

    def _make(self, index: int) -> Sample:
        known = None if self.extents is None else self.extents.row(index)
        if known is not None and not known.tokens:  # why it cannot be used, is no more there
            known = None
        found = self.surveyor(self.rows, index, known=known)
        if found.findings:
            raise BadSampleError(found.findings[0])
        tokens, extent = found.tokens, found.extent
        assert tokens is not None, "there is no fault"
        ends = np.cumsum(tokens.lengths)
        labels, mask = np.roll(tokens.ids, -1), np.roll(tokens.trained, -1)
        labels[ends - 1], mask[ends - 1] = tokens.ids[ends - 1], False
        pairs = list(zip(found.media, extent.media, strict=True))
        parts = zip(np.split(tokens.ids, ends[:-1]), extent.shown, strict=True)
        return Sample(
            input_ids=tokens.ids,
            labels=labels,
            loss_mask=mask.astype(np.float32),
            position_ids=np.concatenate(
                [self.positions(ids, pairs[:shown]) for ids, shown in parts], axis=-1
            ),
            extent=extent,
            where=found.where,
            remarks=found.remarks,
        )

    def positions(
        self, ids: NDArray[np.int64], media: Sequence[tuple[Medium, MediumExtent]]
    ) -> NDArray[np.int64]:
        """Of tokens [n] with these media: time, height, width, [3, n] int64."""
        if self._plain_positions or self.processor.images is None:
            return plain_position_ids(len(ids))
        vision, style, tokens = self.processor.vision, self.videos.style, self.processor.token_ids
        grids = {
            kind: [extent.grid for _, extent in media if extent.kind == kind]
            for kind in ("image", "video")
        }
        rates = [each.fps for each, _ in media if isinstance(each, Video | VideoClip)]
        times = [
            style.times(grid[0], fps=fps, temporal_patch_size=vision.temporal_patch_size)
            for grid, fps in zip(grids["video"], rates, strict=True)
        ]
        return mrope_position_ids(
            ids,
            image_token_id=tokens.get("image_token_id"),
            video_token_id=tokens.get("video_token_id"),
            image_grids=grids["image"],
            video_grids=grids["video"],
            video_times=None if style.timestamps else times,
            after_times=style.as_sounds,
            spatial_merge_size=vision.spatial_merge_size,
        )
