"""A dataset of chats: rows by index, surveyed, to samples with tokens, labels and positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loongplug.data.blend import Rows, Source, sources_of
from loongplug.data.conversation import (
    Conversation,
    Medium,
    Named,
    Video,
    VideoClip,
    parse_conversation,
)
from loongplug.data.extent_index import IndexedExtents
from loongplug.data.media_files import ChangedFileError, InlineFile
from loongplug.data.media_kinds import KINDS, Context, each_of, kind_of, opened
from loongplug.data.object_store import StoreError
from loongplug.data.processor import Processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.sample import (
    MAKE_AGAIN,
    MASKED,
    UNUSABLE,
    BadSample,
    BadSampleError,
    MediumExtent,
    Remark,
    RowExtent,
    Sample,
    bad_as,
    mrope_position_ids,
    plain_position_ids,
    runs_of,
)
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.tokens import (
    Tokens,
    TrainingPhase,
    require_length,
    tokenize_conversation,
)
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle
from loongplug.data.workers import ByteBoundedCache

_KNOWN_FILES = 65_536  # whose decoding is remembered, in each process


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a row becomes: nothing, with the reasons in ``findings``, for one that has faults."""

    where: str  # path:line
    findings: tuple[BadSample, ...] = ()
    remarks: tuple[Remark, ...] = ()
    media: tuple[Medium, ...] = ()  # of the row
    tokens: Tokens | None = None
    extent: RowExtent = UNUSABLE
    turns_differ: bool = False  # as of the tokens


class Surveyor:
    """Surveys rows, in whatever process; samples above ``seq_length`` have a fault."""

    def __init__(
        self,
        processor: Processor,
        *,
        videos: VideoProcessor,
        phase: TrainingPhase,
        seq_length: float = inf,
    ) -> None:
        self.processor = processor
        self.videos = videos
        self._phase = phase
        self._seq_length = seq_length
        self._fault = lru_cache(maxsize=_KNOWN_FILES)(_fault)

    @classmethod
    def of(cls, settings: SurveySettings, *, seq_length: float = inf) -> Self:
        """The surveyor by the folder's processor, for a model whose tokens are the folder's."""
        processor = settings.processor()
        style = VideoStyle(timestamps=settings.timestamps)
        videos = VideoProcessor(processor, style, fps=settings.video_fps)
        phase = settings.training_phase
        return cls(processor, videos=videos, phase=phase, seq_length=seq_length)

    def __call__(
        self, rows: Rows, index: int, *, known: RowExtent | None = None, decodes: bool = False
    ) -> Survey:
        """The survey of a row, with all that is wrong with its media, else with the first fault.

        Opens the media's headers, unless the row's extent is ``known``; with ``decodes``, decodes
        them too. A fault that shows only then, and one of length, leave the row its tokens.
        """
        where = rows.where(index)
        context = Context(self.processor, self.videos, where)
        findings: list[BadSample] = []
        remarks: tuple[Remark, ...] = ()
        try:
            conversation = self.conversation(rows, index)
            remarks = conversation.remarks
            if MASKED in remarks:
                masked = BadSample("masked", f"{where}: left out by its loss or weight.")
                raise BadSampleError(masked)
            if known is not None:
                extents = known.media
                numbered = dict(enumerate(extents))
                media = tuple(self.known_media(conversation, rows, index, numbered).values())
            else:
                with bad_as("media"):
                    named = conversation.media(rows.media_root(index))
                found = each_of(partial(self._opened, where=where, decodes=decodes), named)
                for _, _, faults, odd in found:
                    findings += faults
                    remarks += odd
                if any(each.kind == "media" for each in findings):
                    return Survey(where=where, findings=tuple(findings), remarks=remarks)
                media = tuple(medium for medium, _, _, _ in found if medium is not None)
                extents = tuple(extent for _, extent, _, _ in found if extent is not None)
            with bad_as("text"):
                tokens = tokenize_conversation(
                    conversation,
                    self.processor,
                    phase=self._phase,
                    placeholders=[
                        KINDS[extent.kind].placeholder(medium, extent.grid, context)
                        for medium, extent in zip(media, extents, strict=True)
                    ],
                )
        except BadSampleError as error:
            return Survey(where=where, findings=(*findings, error.sample), remarks=remarks)
        try:
            require_length(*tokens.lengths, where=where, seq_length=self._seq_length)
        except BadSampleError as error:
            findings.append(error.sample)
        begins = np.cumsum((0, *tokens.lengths[:-1]))
        return Survey(
            where=where,
            findings=tuple(findings),
            remarks=remarks,
            media=media,
            tokens=tokens,
            turns_differ=tokens.turns_differ,
            extent=RowExtent(
                lengths=tokens.lengths,
                shown=tokens.media,
                media=extents,
                runs=runs_of(tokens.ids, self.processor.places(*KINDS)),
                # Nothing says a rendering's first token beforehand.
                trained=int(tokens.trained.sum() - tokens.trained[begins].sum()),
                answers=tokens.answers,
            ),
        )

    def conversation(self, rows: Rows, index: int) -> Conversation:
        """What the row says; BadSampleError where it is none."""
        with bad_as("row"):
            ignored = rows.access.ignored if rows.access.ignore_keys else ()
            return parse_conversation(rows.read(index), where=rows.where(index), ignored=ignored)

    def known_media(
        self, conversation: Conversation, rows: Rows, index: int, known: Mapping[int, MediumExtent]
    ) -> dict[int, Medium]:
        """The media of a row whose extents are ``known``, by their numbers; opens no header."""
        where = conversation.where
        with bad_as("media"):
            named = conversation.media(rows.media_root(index))
        if max(known, default=-1) >= len(named):
            raise ChangedFileError(
                f"{where}: the row has {len(named)} media, fewer than by its index. {MAKE_AGAIN}"
            )
        context = Context(self.processor, self.videos, where)
        return {
            number: KINDS[extent.kind].known(named[number], extent, context)
            for number, extent in known.items()
        }

    def _opened(
        self, named: Named, *, where: str, decodes: bool
    ) -> tuple[Medium | None, MediumExtent | None, list[BadSample], tuple[Remark, ...]]:
        """The medium and its extent, if its header can be used; faults, and what is odd."""
        try:
            with bad_as("media"):
                medium, extent = opened(named, Context(self.processor, self.videos, where))
        except BadSampleError as error:
            return None, None, [error.sample], ()
        fault: str | None = None
        odd: tuple[Remark, ...] = ()
        if decodes:
            # One within a row is there once, and would be kept whole.
            file = kind_of(medium).files(medium)[0]
            fault, odd = (_fault if isinstance(file, InlineFile) else self._fault)(medium)
        faults = [] if fault is None else [BadSample("pixels", f"{where}: {fault}")]
        return medium, extent, faults, odd


def _fault(medium: Medium) -> tuple[str | None, tuple[Remark, ...]]:
    """Why the pixels or the sound cannot be read, if they cannot; else what is odd of a video."""
    try:
        return None, tuple(("video", odd) for odd in kind_of(medium).checked(medium))
    except ValueError as error:
        return str(error).removeprefix(": "), ()


class ChatDataset:
    """Rows as samples, by index, with a bounded cache; opens headers of media only.

    ``plain_positions``: the model's family counts tokens alone. ``video_fps``: how many frames to
    take per second of video files whose row does not say.
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
        parts = list[Sample]()
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
                said = f"{self.rows.where(index)}: {type(error).__name__}: {error}"
                raise RuntimeError(said) from error
        return parts

    @property
    def sources(self) -> tuple[Source, ...]:
        return sources_of(self.rows)

    def share_cache(self, processes: int) -> None:
        """Keep only so much that this many processes together keep what one would."""
        self._cache = ByteBoundedCache(self._cache_bytes // processes)

    def media(self, index: int, known: Mapping[int, MediumExtent]) -> dict[int, Medium]:
        """The media of a row whose extents are ``known``, by their numbers; opens no header."""
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
        """The positions of tokens [n] with these media: time, height, width, [3, n] int64."""
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
