"""The images and videos of samples: what stands for them in the text, and their pixels."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from PIL import Image
from torch import Tensor

from loongplug.data.cache import ByteBoundedCache
from loongplug.data.conversation import Medium, Video, VideoClip, VideoFile
from loongplug.data.images import FileVersion, decode_image, file_version, image_grid
from loongplug.data.media_files import MediaFile
from loongplug.data.microbatch import MediaInput
from loongplug.data.object_store import RemoteFile
from loongplug.data.positions import Grid
from loongplug.data.processor import Processor
from loongplug.data.template import Placeholder
from loongplug.data.video import VideoProcessor, patch_times

_AT_ONCE = 16  # files of an object store that are asked for at a time


def each_of[Result](function: Callable[[Medium], Result], media: Sequence[Medium]) -> list[Result]:
    """What ``function`` makes of each, in order, and the first error that it raises in that order.

    Images of an object store are asked for at one time, as each of them takes little but waiting.
    """
    images = all(isinstance(medium, MediaFile) for medium in media)
    if len(media) > 1 and images and any(isinstance(medium, RemoteFile) for medium in media):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(function, media))
    return [function(medium) for medium in media]


def open_medium(
    medium: MediaFile | Video | VideoFile, *, videos: VideoProcessor, where: str
) -> Medium:
    """What a row names, with the frames chosen that are taken of a video file; reads its header.

    Raises ValueError, with ``where``, for a video that cannot be used or that the model's family
    does not take.
    """
    if not isinstance(medium, MediaFile):
        videos.require(where=where)
    return videos.clip(medium, where=where) if isinstance(medium, VideoFile) else medium


def medium_grid(
    medium: Medium, processor: Processor, *, videos: VideoProcessor, where: str
) -> Grid:
    """The patch grid that the pixels will have; reads file headers only."""
    if isinstance(medium, MediaFile):
        return image_grid(medium, processor, where=where)
    return videos.grid(medium, where=where)


def placeholder(
    medium: Medium, grid: Grid, processor: Processor, *, videos: VideoProcessor
) -> Placeholder:
    """What stands in the text for an image or a video of this grid."""
    time, height, width = grid
    tokens = processor.tokens
    tokens_per_time = height * width // processor.spatial_merge_size**2
    if isinstance(medium, MediaFile):
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


class MediaLoader:
    """Image files and videos to one microbatch's pixels, with a bounded cache of processed ones.

    All images that are not in the cache go through the image processor in one call, which
    takes less than half the time of one call each; videos go one by one. A file that changes is
    processed again.
    """

    def __init__(
        self, processor: Processor, *, videos: VideoProcessor, cache_bytes: int = 256 * 2**20
    ) -> None:
        self._processor = processor
        self._videos = videos
        self._cache: ByteBoundedCache[_Version, _Patches] = ByteBoundedCache(cache_bytes)
        self.decoded = 0  # images and videos so far; those found in the cache do not count

    def load(self, media: Sequence[Medium], *, where: str) -> MediaInput:
        """Images and videos in order; none give the zero-length unit.

        Raises ValueError, with ``where``, for a file that is missing, damaged or no image.
        """
        if not media:
            return MediaInput(
                rows=torch.zeros(0, self._processor.patch_dim),
                grids=torch.zeros(0, 3, dtype=torch.int64),
            )
        versions = each_of(partial(_version, where=where), media)
        loaded = {version: found for version in versions if (found := self._cache.get(version))}
        missing = {
            version: medium
            for version, medium in zip(versions, media, strict=True)
            if version not in loaded
        }
        for version, patches in self._process(missing, where=where).items():
            loaded[version] = patches
            self._cache.put(version, patches, size=patches[0].nbytes)
        pixels, grids = zip(*(loaded[version] for version in versions), strict=True)
        return MediaInput(rows=torch.cat(pixels), grids=torch.tensor(grids))

    def _process(
        self, media: dict["_Version", Medium], *, where: str
    ) -> dict["_Version", "_Patches"]:
        self.decoded += len(media)
        files = {
            version: medium for version, medium in media.items() if isinstance(medium, MediaFile)
        }
        decoded = each_of(partial(_decoded, where=where), list(files.values()))
        images = dict(zip(files, decoded, strict=True))
        processed: dict[_Version, _Patches] = {}
        if images:
            made = self._processor.images.patches(list(images.values()))
            processed.update(zip(images, made, strict=True))
        for version, medium in media.items():
            if not isinstance(medium, MediaFile):
                processed[version] = self._videos.patches(medium, where=where)
        return processed


# Of a video, the versions of its files, and which frames of a file are taken: the rate of the
# frames changes no pixel.
_Version = FileVersion | tuple[FileVersion | int, ...]


_Patches = tuple[Tensor, Grid]  # [patches, patch_dim] float32


def _decoded(medium: Medium, *, where: str) -> Image.Image:
    assert isinstance(medium, MediaFile)
    return decode_image(medium, where=where)


def _version(medium: Medium, *, where: str) -> _Version:
    if isinstance(medium, MediaFile):
        return file_version(medium, where=where)
    if isinstance(medium, VideoClip):
        return file_version(medium.path, where=where), *medium.indices
    return tuple(file_version(frame, where=where) for frame in medium.frames)
