"""The survey of a row: what training makes of it, how large that is, and what is wrong with it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np

from loongplug.data.bad_samples import BadSample, BadSampleError, bad_as
from loongplug.data.blend import Rows
from loongplug.data.conversation import Conversation, Medium, Named
from loongplug.data.extents import UNUSABLE, MediumExtent, RowExtent, runs_of
from loongplug.data.formats import parse_conversation
from loongplug.data.kept_files import ChangedFileError
from loongplug.data.kinds import KINDS, Context, each_of, kind_of, opened
from loongplug.data.media_files import InlineFile
from loongplug.data.pixel_limits import FOLDERS_LIMITS, PixelLimits
from loongplug.data.processor import MultiTurn, Processor, load_processor
from loongplug.data.remarks import MASKED, Remark
from loongplug.data.rows import ANY_ROW, RowAccess
from loongplug.data.template import Tokens, TrainingPhase, tokenize_conversation
from loongplug.data.video import VideoProcessor, VideoStyle, video_style_of

MAKE_AGAIN = "Make the index again with `loongplug data index`, or remove its *.lengths file."
_KNOWN_FILES = 65_536  # whose decoding is remembered, in each process


@dataclass(frozen=True, kw_only=True)
class SurveySettings:
    """What decides, beside rows and media, what rows become."""

    folder: Path  # of tokenizer, template and processors
    training_phase: TrainingPhase
    timestamps: bool  # how the model's family tells the time in videos
    video_fps: float | None = None
    special_tokens_in_text: bool = False
    multi_turn: MultiTurn = "split"
    train_template_thought: bool = False
    pixel_limits: PixelLimits = FOLDERS_LIMITS
    access: RowAccess = ANY_ROW
    index_dir: Path | None = None  # where indexes lie; without, beside their data

    @classmethod
    def of(cls, given: Mapping[str, Any], **others: Any) -> Self:
        """Those of a command line's options; ``timestamps`` as the folder's, unless given."""
        names = {each.name for each in fields(cls)} & given.keys()
        folder = Path(given["tokenizer_model"])
        found = {
            **{name: given[name] for name in names},
            "folder": folder,
            "access": RowAccess.of(given),
            "pixel_limits": PixelLimits.of(given),
            **others,
        }
        if "timestamps" not in found:
            found["timestamps"] = video_style_of(folder).timestamps
        return cls(**found)

    @property
    def options(self) -> dict[str, Any]:
        """Those that a command line gives, but for places; ``data index`` has all of them."""
        return {
            "training_phase": self.training_phase,
            "video_fps": self.video_fps,
            "special_tokens_in_text": self.special_tokens_in_text,
            "multi_turn": self.multi_turn,
            "train_template_thought": self.train_template_thought,
            "max_row_mib": self.access.max_row_mib,
            "confine_media": self.access.confine_media,
            "ignore_keys": self.access.ignore_keys,
            "columns": self.access.columns,
            **self.pixel_limits.given(),
        }

    def surveyor(self, *, seq_length: float = inf) -> "Surveyor":
        """By the folder's processor, for a model whose tokens are the folder's."""
        processor = load_processor(
            self.folder,
            special_tokens_in_text=self.special_tokens_in_text,
            multi_turn=self.multi_turn,
            train_template_thought=self.train_template_thought,
            pixel_limits=self.pixel_limits,
        )
        style = VideoStyle(timestamps=self.timestamps)
        videos = VideoProcessor(processor, style, fps=self.video_fps)
        return Surveyor(processor, videos=videos, phase=self.training_phase, seq_length=seq_length)


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

    def __call__(
        self, rows: Rows, index: int, *, known: RowExtent | None = None, decodes: bool = False
    ) -> Survey:
        """Of a row; ``findings`` are all that is wrong with its media, else the first fault.

        Opens the media's headers, unless the row's extent is ``known``. With ``decodes``, decodes
        them too, each file once while it is remembered; a fault that shows only then, and one of
        length, leave the row its tokens.
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
            return parse_conversation(
                rows.read(index), where=rows.where(index), ignored=rows.access.ignored
            )

    def known_media(
        self, conversation: Conversation, rows: Rows, index: int, known: Mapping[int, MediumExtent]
    ) -> dict[int, Medium]:
        """Those of a row's media whose extents are ``known``, by their numbers; opens no header.

        Raises:
            ChangedFileError: the row has fewer.
        """
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


def require_length(*renderings: int, where: str, seq_length: float) -> None:
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
