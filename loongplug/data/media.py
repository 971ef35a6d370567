"""The media of samples: what stands for them in the text, and their rows for the encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from loongplug.data.audio_files import audio_length, decode_audio
from loongplug.data.audio_frames import AudioFrames
from loongplug.data.cache import ByteBoundedCache
from loongplug.data.coded_media import CodedMedia, is_coded
from loongplug.data.conversation import (
    AudioClip,
    AudioFile,
    Medium,
    Named,
    VideoClip,
    VideoFile,
)
from loongplug.data.extents import MediumExtent
from loongplug.data.images import FileVersion, decode_image, file_version, image_grid
from loongplug.data.media_files import MediaFile
from loongplug.data.microbatch import MediaInput
from loongplug.data.object_store import RemoteFile
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.template import Placeholder
from loongplug.data.video import VideoProcessor, patch_times
from loongplug.data.video_files import VideoHeader

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 16  # files of an object store that are asked for at a time


def each_of[Kind: Medium | Named, Result](
    function: Callable[[Kind], Result], media: Sequence[Kind]
) -> list[Result]:
    """What ``function`` makes of each, in order, and the first error that it raises in that order.

    Images and sounds of an object store are asked for at one time, as each of them takes little but
    waiting.
    """
    files = [medium.path if isinstance(medium, AudioClip) else medium for medium in media]
    alone = all(isinstance(file, MediaFile) for file in files)
    if len(media) > 1 and alone and any(isinstance(file, RemoteFile) for file in files):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(function, media))
    return [function(medium) for medium in media]


def open_medium(
    medium: Named, processor: Processor, *, videos: VideoProcessor, where: str
) -> Medium:
    """What a row names, with what is known of it beforehand; reads headers of videos and sounds.

    That is which frames are taken of a video file, and how long a sound is. Raises ValueError, with
    ``where``, for a video or a sound that cannot be used, and for what the model's family does not
    take.
    """
    if isinstance(medium, AudioFile):
        enough = _hearing(processor, where=where).most_samples
        return AudioClip(medium.path, audio_length(medium.path, where=where, enough=enough))
    if isinstance(medium, MediaFile):
        if processor.images is None or processor.tokens.image is None:
            raise ValueError(
                f"{where}: the row has an image, but this model takes sounds and text alone: drop"
                " the row."
            )
        return medium
    videos.require(where=where)
    return videos.clip(medium, where=where) if isinstance(medium, VideoFile) else medium


def _hearing(processor: Processor, *, where: str) -> AudioFrames:
    """What cuts sounds; ValueError with ``where``, that of a row with one, where none does."""
    if processor.tokens.audio is None:
        raise ValueError(
            f"{where}: the row has a sound, but this model takes none: drop the row, or write what"
            " is heard as text."
        )
    if processor.audio is None:
        raise ValueError(
            f"{where}: the row has a sound, but there is no feature extractor in"
            f" {processor.folder}: copy it from the model that this folder belongs to."
        )
    return processor.audio


def medium_grid(
    medium: Medium, processor: Processor, *, videos: VideoProcessor, where: str
) -> Grid:
    """The grid that the rows will have; reads file headers only."""
    if isinstance(medium, MediaFile):
        return image_grid(medium, processor, where=where)
    if isinstance(medium, AudioClip):
        try:
            return _hearing(processor, where=where).grid(medium.samples)
        except ValueError as error:
            raise ValueError(
                f"{where}: audio {medium.path} cannot be used: {error}: drop the row, or cut the"
                " sound."
            ) from error
    return videos.grid(medium, where=where)


def extent_of(medium: Medium, grid: Grid) -> MediumExtent:
    """Of a medium whose header was read."""
    if isinstance(medium, AudioClip):
        return MediumExtent("audio", grid, (medium.samples,))
    if isinstance(medium, MediaFile):
        return MediumExtent("image", grid)
    detail: tuple[float, ...] = (len(medium.times),)
    if isinstance(medium, VideoClip):
        detail += (medium.total_frames, medium.file_fps, medium.height, medium.width)
    return MediumExtent("video", grid, detail)


def known_medium(
    named: Named, extent: MediumExtent, *, videos: VideoProcessor, where: str
) -> Medium:
    """What a row names, of which the ``extent`` is known; opens no header."""
    if isinstance(named, AudioFile):
        return AudioClip(named.path, int(extent.detail[0]))
    if not isinstance(named, VideoFile):
        return named
    _, frames, fps, height, width = extent.detail
    header = VideoHeader(frames=int(frames), fps=fps, height=int(height), width=int(width))
    return videos.clip(named, header=header, where=where)


def placeholder(
    medium: Medium, grid: Grid, processor: Processor, *, videos: VideoProcessor
) -> Placeholder:
    """What stands in the text for a medium of this grid."""
    tokens = processor.tokens
    if isinstance(medium, AudioClip):
        assert tokens.audio is not None, "open_medium refuses the row"
        run = token_count(medium, grid, processor)
        return Placeholder(token=tokens.audio, text=tokens.audio, run=run)
    time, height, width = grid
    tokens_per_time = height * width // processor.spatial_merge_size**2
    if isinstance(medium, MediaFile):
        assert tokens.image is not None, "open_medium refuses the row"
        start, end = processor.around_images
        text = f"{start}{tokens.image}{end}"
        return Placeholder(token=tokens.image, text=text, run=time * tokens_per_time)
    assert tokens.video is not None, "open_medium refuses the row"
    if not videos.style.timestamps:
        return Placeholder(token=tokens.video, text=tokens.video, run=time * tokens_per_time)
    times = patch_times(medium.times, temporal_patch_size=processor.temporal_patch_size)
    pictures = [
        f"<{seconds:.1f} seconds>{tokens.start or ''}{tokens.video}{tokens.end or ''}"
        for seconds in times
    ]
    return Placeholder(token=tokens.video, text="".join(pictures), run=tokens_per_time)


def token_count(medium: Medium, grid: Grid, processor: Processor) -> int:
    """How many tokens in the text hold the places of a medium of this grid."""
    if isinstance(medium, AudioClip):
        assert processor.audio is not None, "open_medium refuses the row"
        return processor.audio.tokens(grid)
    time, height, width = grid
    return time * height * width // processor.spatial_merge_size**2


def coded_media(processor: Processor, videos: VideoProcessor) -> CodedMedia | None:
    """What becomes of rows of bytes; None where there are neither images nor videos."""
    if processor.images is None:
        return None
    return CodedMedia(processor.images.pixel_bytes, videos=lambda: videos.pixel_bytes)


class MediaLoader:
    """Media to one microbatch's rows for an encoder, with a bounded cache of processed ones.

    All images that are not in the cache go through the image processor in one call, which
    takes less than half the time of one call each; videos and sounds go one by one. A file that
    changes is processed again. ``coded`` says what becomes of images and videos, which are bytes.
    """

    def __init__(
        self, processor: Processor, *, videos: VideoProcessor, cache_bytes: int = 256 * 2**20
    ) -> None:
        self._processor = processor
        self._videos = videos
        self.coded = coded_media(processor, videos)
        self._cache: ByteBoundedCache[_Version, _Rows] = ByteBoundedCache(cache_bytes)
        self.decoded = 0  # media so far; those found in the cache do not count

    def load(self, media: Sequence[Medium], *, where: str, sounds: bool = False) -> MediaInput:
        """Media of one encoder in order: images and videos, or sounds; rows are values.

        None give the zero-length unit, of frames with ``sounds``. Raises ValueError as
        :meth:`rows` does.
        """
        import torch

        if not media:
            return MediaInput(
                rows=self.no_rows(sounds=sounds), grids=torch.zeros(0, 3, dtype=torch.int64)
            )
        rows, grids = self.rows(media, where=where)
        extents = list(map(extent_of, media, grids))
        if is_coded(extents):
            assert self.coded is not None, "open_medium refuses images and videos"
            rows = self.coded.decoded(rows, extents)
        return MediaInput(rows=rows, grids=torch.tensor(grids))

    def rows(self, media: Sequence[Medium], *, where: str) -> tuple[Tensor, list[Grid]]:
        """Of one or more media of one encoder: rows of images and videos are bytes.

        Those are as :class:`~loongplug.data.coded_media.CodedMedia` takes them; frames of sounds
        are [frames, mel_bins] float32. Raises ValueError, with ``where``, for a file that is
        missing, damaged or not of its kind.
        """
        import torch

        assert len({isinstance(medium, AudioClip) for medium in media}) == 1, "one encoder's"
        versions = each_of(partial(_version, where=where), media)
        loaded = {version: found for version in versions if (found := self._cache.get(version))}
        missing = {
            version: medium
            for version, medium in zip(versions, media, strict=True)
            if version not in loaded
        }
        for version, made in self._process(missing, where=where).items():
            loaded[version] = made
            self._cache.put(version, made, size=made[0].nbytes)
        rows, grids = zip(*(loaded[version] for version in versions), strict=True)
        return torch.cat(rows), list(grids)

    def no_rows(self, *, sounds: bool) -> Tensor:
        """None of an encoder's rows of values, [0, values of a row] float32."""
        import torch

        if not sounds:
            return torch.zeros(0, self._processor.patch_dim)
        assert self._processor.audio is not None, "open_medium refuses sounds"
        return torch.zeros(0, self._processor.audio.mel_bins)

    def _process(self, media: dict[_Version, Medium], *, where: str) -> dict[_Version, _Rows]:
        self.decoded += len(media)
        files = {version: each for version, each in media.items() if isinstance(each, MediaFile)}
        decode = partial(decode_image, where=where, transparency=self._processor.transparency)
        decoded = each_of(decode, list(files.values()))
        images = dict(zip(files, decoded, strict=True))
        processed: dict[_Version, _Rows] = {}
        if images:
            made = self._processor.vision.coded(list(images.values()))
            processed.update(zip(images, made, strict=True))
        for version, medium in media.items():
            if isinstance(medium, AudioClip):
                sound = decode_audio(medium, where=where)
                (processed[version],) = _hearing(self._processor, where=where).frames([sound])
            elif not isinstance(medium, MediaFile):
                processed[version] = self._videos.coded(medium, where=where)
        return processed


# Of a video, the versions of its files, and which frames of a file are taken: the rate of the
# frames changes no pixel. Of a sound, its file's with its kind.
_Version = FileVersion | tuple[FileVersion | int, ...] | tuple[FileVersion, str]


# Of an image or a video as bytes; of a sound float32, [frames, mel_bins].
type _Rows = tuple[Tensor, Grid]


def _version(medium: Medium, *, where: str) -> _Version:
    if isinstance(medium, MediaFile):
        return file_version(medium, where=where)
    if isinstance(medium, AudioClip):
        return file_version(medium.path, where=where, kind="audio"), "audio"
    if isinstance(medium, VideoClip):
        return file_version(medium.path, where=where), *medium.indices
    return tuple(file_version(frame, where=where) for frame in medium.frames)
