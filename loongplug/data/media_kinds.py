"""Kinds of media: images, videos and sounds, an object for each with all that differs by kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from loongplug.data.audio_files import audio_length, decode_audio
from loongplug.data.conversation import (
    AnyVideo,
    AudioClip,
    MediaPart,
    Medium,
    Named,
    Video,
    VideoClip,
    VideoHeader,
)
from loongplug.data.media_files import MediaFile, decode_image, file_version, image_size
from loongplug.data.media_sizes import SAMPLE_RATE
from loongplug.data.object_store import RemoteFile
from loongplug.data.processor import Processor
from loongplug.data.sample import MEDIA_KINDS, Grid, MediumExtent, OddVideos, told
from loongplug.data.video import VideoProcessor, decode_video, patch_times, video_size

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 16  # files of an object store that are asked for at a time


@dataclass(frozen=True)
class Context:
    """What makes tokens and rows of media, and where they are named, to be said in errors."""

    processor: Processor
    videos: VideoProcessor
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """What stands for a medium, where the chat template wrote ``token`` once."""

    token: str
    text: str
    run: int


class Kind[Of: Medium](ABC):
    """A kind of media: what becomes of them on their way from a row to an encoder."""

    name: str  # as templates and encoders' entries have it
    media: Any  # the type of what a row names, once headers have been read
    marks = "vision"  # by which names models have the ids of tokens around one
    file = "image"  # what to call a file of theirs
    coded = True  # whether rows come as bytes of pixels, and become values where they are encoded
    waits = True  # whether looking at one takes little but waiting for an object store

    @abstractmethod
    def opened(self, named: Named, context: Context) -> Of:
        """What a row names; reads headers where anything but the grid depends on them."""

    @abstractmethod
    def grid(self, medium: Of, context: Context) -> Grid:
        """The grid that the rows will have; reads headers only."""

    def tokens(self, grid: Grid, processor: Processor) -> int:
        """How many tokens hold the places of a medium of this grid."""
        return prod(grid) // processor.vision.spatial_merge_size**2

    def written(self, processor: Processor) -> str:
        """What stands for a medium where no template writes it."""
        start, end = processor.around(self.marks)
        return f"{start}{processor.tokens[f'{self.name}_token_id']}{end}"

    def placeholder(self, medium: Of, grid: Grid, context: Context) -> Placeholder:
        """What stands in the text for a medium of this grid."""
        token = context.processor.tokens[f"{self.name}_token_id"]
        return Placeholder(token=token, text=token, run=self.tokens(grid, context.processor))

    @abstractmethod
    def files(self, medium: Of) -> tuple[MediaFile, ...]:
        """All that are read for it."""

    def version(self, medium: Of, *, where: str) -> tuple[Any, ...]:
        """Media of one version have the same rows; a video's rate, for one, changes no pixel."""
        files = (file_version(file, where=where, kind=self.file) for file in self.files(medium))
        return self.name, getattr(medium, "indices", ()), *files

    @abstractmethod
    def checked(self, medium: Of) -> list[str]:
        """What is odd of a video, once decoded; ValueError for a file that cannot be read."""

    @abstractmethod
    def rows(self, media: Sequence[Of], context: Context) -> Sequence[tuple[Tensor, Grid]]:
        """Of each medium its rows for the encoder, bytes or float32, and their grid."""

    def detail(self, medium: Of) -> tuple[float, ...]:
        """What its header says beside the grid, see :class:`MediumExtent`."""
        return ()

    def known(self, named: Named, extent: MediumExtent, context: Context) -> Of:
        """What a row names, of a known extent; opens nothing."""
        return self.opened(named, context)  # so of images alone

    def loaded_rows(self, extent: MediumExtent) -> int:
        """How many rows are loaded: of an image's frame or tiles, one for each patch."""
        return prod(extent.grid)

    @abstractmethod
    def model_inputs(self, rows: Tensor, grids: Tensor, processor: Processor) -> dict[str, Tensor]:
        """What the model in transformers is given, of rows of media one after the other."""

    @abstractmethod
    def described(self, medium: Of, *, where: str) -> str:
        """The medium and its size for people."""


class _Images(Kind[MediaFile]):
    name, media = "image", MediaFile

    def opened(self, named: Named, context: Context) -> MediaFile:
        assert not isinstance(named.source, tuple)
        return named.source

    def grid(self, medium: MediaFile, context: Context) -> Grid:
        size = image_size(medium, where=context.where)
        with told(f"{context.where}: image {medium} cannot be used: ", "."):
            return context.processor.vision.grid(*size)

    def placeholder(self, medium: MediaFile, grid: Grid, context: Context) -> Placeholder:
        found = super().placeholder(medium, grid, context)
        start, end = context.processor.around("image")
        return replace(found, text=f"{start}{found.text}{end}")

    def files(self, medium: MediaFile) -> tuple[MediaFile, ...]:
        return (medium,)

    def checked(self, medium: MediaFile) -> list[str]:
        decode_image(medium, where="")
        return []

    def rows(self, media: Sequence[MediaFile], context: Context) -> list[tuple[Tensor, Grid]]:
        processor = context.processor
        decode = partial(decode_image, where=context.where, transparency=processor.transparency)
        # In one call: it takes less than half the time of one each.
        return processor.vision.coded(each_of(decode, media))

    def model_inputs(self, rows: Tensor, grids: Tensor, processor: Processor) -> dict[str, Tensor]:
        return processor.vision.model_inputs(rows, grids)

    def described(self, medium: MediaFile, *, where: str) -> str:
        height, width = image_size(medium, where=where)
        return f"image {medium}, {width} x {height} pixels"


class _Videos(Kind[AnyVideo]):
    name, media, waits = "video", AnyVideo, False

    def opened(self, named: Named, context: Context) -> AnyVideo:
        return self.known(named, None, context)

    def known(self, named: Named, extent: MediumExtent | None, context: Context) -> AnyVideo:
        source, header = named.source, None
        if isinstance(source, tuple):
            assert named.fps is not None, "the schema asks for it"
            return Video(source, named.fps)
        if extent is not None:
            _, frames, fps, height, width = extent.detail
            header = VideoHeader(int(frames), fps, int(height), int(width))
        return context.videos.clip(source, fps=named.fps, where=context.where, header=header)

    def detail(self, medium: AnyVideo) -> tuple[float, ...]:
        taken = len(medium.times)
        return (taken,) if isinstance(medium, Video) else (taken, *astuple(medium.header))

    def grid(self, medium: AnyVideo, context: Context) -> Grid:
        return context.videos.grid(medium, where=context.where)

    def placeholder(self, medium: AnyVideo, grid: Grid, context: Context) -> Placeholder:
        """A picture for each temporal patch behind its time, in families that write times."""
        whole, processor = super().placeholder(medium, grid, context), context.processor
        if not context.videos.style.timestamps:
            return whole
        start, end = processor.around("vision")
        times = patch_times(medium.times, temporal_patch_size=processor.vision.temporal_patch_size)
        text = "".join(f"<{seconds:.1f} seconds>{start}{whole.token}{end}" for seconds in times)
        return replace(whole, text=text, run=self.tokens((1, *grid[1:]), processor))

    def files(self, medium: AnyVideo) -> tuple[MediaFile, ...]:
        return medium.frames if isinstance(medium, Video) else (medium.path,)

    def checked(self, medium: AnyVideo) -> list[str]:
        found: OddVideos = []
        decode_video(medium, where="", odd=found)
        return [kind for kind, _ in found]

    def rows(self, media: Sequence[AnyVideo], context: Context) -> list[tuple[Tensor, Grid]]:
        return [context.videos.coded(medium, where=context.where) for medium in media]

    def loaded_rows(self, extent: MediumExtent) -> int:
        return int(extent.detail[0]) * prod(extent.grid[1:])  # of each frame, none twice

    def model_inputs(self, rows: Tensor, grids: Tensor, processor: Processor) -> dict[str, Tensor]:
        return {"pixel_values_videos": rows, "video_grid_thw": grids}

    def described(self, medium: AnyVideo, *, where: str) -> str:
        height, width = video_size(medium, where=where)
        name, frames = f"of {self.files(medium)[0]}", f"{len(medium.times)} frames"
        if isinstance(medium, VideoClip):
            name, frames = f"{medium.path}", f"{len(medium.times)} of {medium.header.frames} frames"
        return f"video {name}, {width} x {height} pixels, {frames}, {medium.fps:.3g} a second"


class _Sounds(Kind[AudioClip]):
    name, media, marks, file, coded = "audio", AudioClip, "audio", "audio", False

    def opened(self, named: Named, context: Context) -> AudioClip:
        processor, where = context.processor, context.where
        if processor.audio is None:
            raise ValueError(
                f"{where}: the row has a sound, but there is no feature extractor in"
                f" {processor.folder}: copy it from the model that this folder belongs to."
            )
        assert not isinstance(named.source, tuple)
        enough = processor.audio.most_samples
        return AudioClip(named.source, audio_length(named.source, where=where, enough=enough))

    def known(self, named: Named, extent: MediumExtent, context: Context) -> AudioClip:
        assert not isinstance(named.source, tuple)
        return AudioClip(named.source, int(extent.detail[0]))

    def detail(self, medium: AudioClip) -> tuple[float, ...]:
        return (medium.samples,)

    def grid(self, medium: AudioClip, context: Context) -> Grid:
        before = f"{context.where}: audio {medium.path} cannot be used: "
        with told(before, ": drop the row, or cut the sound."):
            return context.processor.hearing.grid(medium.samples)

    def tokens(self, grid: Grid, processor: Processor) -> int:
        return processor.hearing.tokens(grid)

    def files(self, medium: AudioClip) -> tuple[MediaFile, ...]:
        return (medium.path,)

    def checked(self, medium: AudioClip) -> list[str]:
        decode_audio(medium, where="")
        return []

    def rows(self, media: Sequence[AudioClip], context: Context) -> list[tuple[Tensor, Grid]]:
        sounds = (decode_audio(medium, where=context.where) for medium in media)
        return [context.processor.hearing.frames(sound) for sound in sounds]

    def model_inputs(self, rows: Tensor, grids: Tensor, processor: Processor) -> dict[str, Tensor]:
        return processor.hearing.model_inputs(rows, grids)

    def described(self, medium: AudioClip, *, where: str) -> str:
        return f"audio {medium.path}, {medium.samples / SAMPLE_RATE:.2f} seconds"


KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (_Images(), _Videos(), _Sounds())}
# The names that models have for ids of tokens that hold the places of media, or mark them.
TOKEN_IDS = frozenset(
    f"{name}_token_id"
    for kind in KINDS.values()
    for name in (kind.name, f"{kind.marks}_start", f"{kind.marks}_end")
)


def kind_of(medium: Medium) -> Kind[Any]:
    """The one that the medium is of."""
    return next(kind for kind in KINDS.values() if isinstance(medium, kind.media))


def extent_of(medium: Medium, grid: Grid) -> MediumExtent:
    """Of a medium whose header was read."""
    kind = kind_of(medium)
    return MediumExtent(kind.name, grid, kind.detail(medium))


def opened(named: Named, context: Context) -> tuple[Medium, MediumExtent]:
    """What a row names, and its extent by its header; ValueError where it cannot be used."""
    if f"{named.kind}_token_id" not in context.processor.tokens:
        taken = [each for each in MEDIA_KINDS if f"{each}_token_id" in context.processor.tokens]
        raise ValueError(
            f"{context.where}: the row has a medium of kind {named.kind}, but this model takes"
            f" {', '.join(taken)} and text alone: drop the row."
        )
    medium = KINDS[named.kind].opened(named, context)
    return medium, extent_of(medium, kind_of(medium).grid(medium, context))


def each_of[Of: Medium | Named, Result](
    function: Callable[[Of], Result], media: Sequence[Of]
) -> list[Result]:
    """What ``function`` makes of each, in order; files of an object store are asked for at once."""
    named = all(isinstance(medium, MediaPart) for medium in media)
    parts: Any = media
    if not named:
        pairs: Any = [(kind_of(each), each) for each in parts]
        parts = [MediaPart(kind.name, kind.files(each)[0]) for kind, each in pairs]
    waits = all(KINDS[part.kind].waits for part in parts)
    if len(media) > 1 and waits and any(isinstance(part.source, RemoteFile) for part in parts):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(function, media))
    return [function(medium) for medium in media]
