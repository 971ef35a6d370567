"""Videos: how a model family writes their times, their grids and their patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.conversation import AnyVideo, VideoClip, VideoHeader
from loongplug.data.data_options import Transparency
from loongplug.data.folder_files import COMBINED_FILE, IMAGE_FILE, VIDEO_FILE, read_json
from loongplug.data.media_files import MediaFile, decode_image, image_size
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import require_scaling
from loongplug.data.sample import Grid, OddVideos, told
from loongplug.data.video_files import decode_frames, video_header

if TYPE_CHECKING:
    from torch import Tensor

_USUAL_FPS = 2.0


@dataclass(frozen=True, kw_only=True)
class VideoStyle:
    """How a model family tells the time in a video.

    ``timestamps=True``, Qwen3-VL: every temporal patch is a picture of its own behind its time
    written as text, ``<0.5 seconds>``. ``timestamps=False``, Qwen2.5-VL: one block of tokens
    whose time axis counts ``int(frame index * tokens_per_second * seconds_per_grid)``, where a
    frame of the grid is a temporal patch and lasts ``seconds_per_grid``. ``as_sounds``,
    Qwen2.5-Omni: positions are times for sounds as well, so that what follows a video is later.
    """

    timestamps: bool
    tokens_per_second: float = 1.0
    as_sounds: bool = False

    def times(self, frames: int, *, fps: float, temporal_patch_size: int) -> NDArray[np.int64]:
        """What the time axis of a block counts at each of so many temporal patches, [frames].

        In float32 and in the order of transformers: near a whole number, another counts otherwise.
        """
        seconds = np.float32(temporal_patch_size / fps)
        numbers, rate = np.arange(frames, dtype=np.float32), np.float32(self.tokens_per_second)
        each = numbers * seconds * rate if self.as_sounds else numbers * (rate * seconds)
        return each.astype(np.int64)


TIMESTAMPS = VideoStyle(timestamps=True)


def video_style_of(folder: Path) -> VideoStyle:
    """The style that a folder's video processor is for, but for the rate of a block's time axis."""
    if config := _own_config(folder):
        blocks = config.get("video_processor_type") == "Qwen2VLVideoProcessor"
    else:  # a folder of Qwen2.5-VL may have the file for images alone, which serves both
        images = read_json(folder / IMAGE_FILE)
        blocks = images.get("processor_class") in ("Qwen2_5_VLProcessor", "Qwen2_5OmniProcessor")
    return VideoStyle(timestamps=False) if blocks else TIMESTAMPS


def _own_config(folder: Path) -> dict[str, Any]:
    """What is said of videos alone, if anything is; in the order of transformers."""
    found: dict[str, Any] = read_json(folder / COMBINED_FILE).get("video_processor", {})
    return found or read_json(folder / VIDEO_FILE)


def patch_times(times: Sequence[float], *, temporal_patch_size: int) -> list[float]:
    """The middle between the times of each temporal patch's first and last frame, in seconds."""
    last = len(times) - 1
    starts = range(0, len(times), temporal_patch_size)
    return [(times[i] + times[min(i + temporal_patch_size - 1, last)]) / 2 for i in starts]


class VideoProcessor:
    """The video processor of transformers in a model's folder, in the style of its family.

    All frames that a row names are used; of a video file, ``fps`` per second, where the row does
    not say, else as often as the folder's configuration says, and within its limits.
    """

    def __init__(
        self, processor: Processor, style: VideoStyle, *, fps: float | None = None
    ) -> None:
        self._processor = processor
        self._fps = fps
        self.style = style
        self.odd: OddVideos = []  # among those that were decoded, until somebody takes them
        if any(name.startswith("video") for name in processor.pixel_limits.given()):
            where = "--video-min-pixels, --video-max-pixels"
            if "video_token_id" not in processor.tokens:
                raise ValueError(f"{where}: this model takes no videos: leave these flags out.")
            with told(f"{where}: "):
                self.transform  # noqa: B018  wrong ones are told now

    def clip(
        self,
        path: MediaFile,
        *,
        fps: float | None,
        where: str,
        header: VideoHeader | None = None,
    ) -> VideoClip:
        """The frames to take of a video file; reads its header, unless it is given."""
        from transformers.video_utils import VideoMetadata

        header = header or video_header(path, where=where)
        if header.frames < self._processor.vision.temporal_patch_size:
            return VideoClip(path, tuple(range(header.frames)), header)  # too few to sample
        with told(f"{where}: "):
            transform, fps = self.transform, fps or self._fps
        if fps is None and transform.fps is None and transform.num_frames is None:
            fps = _USUAL_FPS  # of both families; only Qwen3-VL's processor says so itself
        metadata = VideoMetadata(total_num_frames=header.frames, fps=header.fps)
        try:
            indices = transform.sample_frames(metadata, fps=fps)
        except (ValueError, OverflowError) as error:  # of rates that no video has
            raise ValueError(f"{where}: {path} cannot be sampled: {error}.") from error
        return VideoClip(path, tuple(map(int, indices)), header)

    def grid(self, video: AnyVideo, *, where: str) -> Grid:
        """The grid of :meth:`coded` rows, by headers; ValueError for frames of unequal size."""
        import torch

        size = video_size(video, where=where)
        count = len(video.times) + self._missing(video)
        # The processor itself says what becomes of this size: shapes without data, no work.
        frames = torch.empty(count, *size, 3, dtype=torch.uint8, device="meta")
        return self._processed(video, frames, where=where)[1]

    @cached_property
    def transform(self) -> Any:
        """The processor of transformers; ValueError where the folder has none for videos."""
        transform = _load(self._processor, self.style)
        vision = self._processor.vision
        token = (vision.patch_size * vision.spatial_merge_size) ** 2
        self._processor.pixel_limits.limit(transform, "video_", patch=token)
        return transform

    def coded(self, video: AnyVideo, *, where: str) -> tuple[Tensor, Grid]:
        """The rows of bytes of the video's frames, and their grid; ValueError for one of no use."""
        import torch

        transparency = self._processor.transparency
        frames = decode_video(video, where=where, odd=self.odd, transparency=transparency)
        frames += frames[-1:] * self._missing(video)
        if len({frame.shape for frame in frames}) > 1:
            raise ValueError(
                f"{where}: the frames of {_name(video)} are of different sizes: do not change image"
                " files while they are in use."
            )
        stacked = torch.from_numpy(np.stack(frames))  # [frames, height, width, 3] uint8
        patches, grid = self._processed(video, stacked, where=where)
        assert patches.dtype == torch.uint8, patches.dtype
        together = self._processor.vision.temporal_patch_size
        return _frame_rows(patches, grid, frames=len(video.times), together=together), grid

    def _processed(self, video: AnyVideo, frames: Tensor, *, where: str) -> tuple[Tensor, Grid]:
        """What the processor makes of bytes, but for the scale of their values."""
        with told(f"{where}: "):
            transform = self.transform
        options = {
            "do_sample_frames": False,
            "input_data_format": "channels_last",
            "do_rescale": False,
            "do_normalize": False,
        }
        with told(f"{where}: {_name(video)} cannot be used: ", "."):
            features = transform([frames], return_tensors="pt", **options)
        time, height, width = features["video_grid_thw"][0].tolist()
        return features["pixel_values_videos"], (time, height, width)

    def _missing(self, video: AnyVideo) -> int:
        """How often the last frame is repeated for processors, which refuse less than one patch."""
        return max(0, self._processor.vision.temporal_patch_size - len(video.times))


def _frame_rows(patches: Tensor, grid: Grid, *, frames: int, together: int) -> Tensor:
    """The rows of bytes of a video's first ``frames``, of patches with so many ``together``.

    [.., channels * frames of a patch * pixels] uint8 to [.., channels * pixels], frame by frame.
    """
    time, height, width = grid
    each = patches.view(time, height * width, 3, together, -1)
    rows = each.permute(0, 3, 1, 2, 4).reshape(time * together * height * width, -1)
    return rows[: frames * height * width].clone()  # a view would keep what is repeated


def _name(video: AnyVideo) -> str:
    if isinstance(video, VideoClip):
        return f"the video {video.path}"
    return f"the video of frame {video.frames[0]}"


def decode_video(
    video: AnyVideo, *, where: str, odd: OddVideos, transparency: Transparency = "white"
) -> list[NDArray[np.uint8]]:
    """The frames, [height, width, 3] each; what is odd of the video is put into ``odd``."""
    if isinstance(video, VideoClip):
        return decode_frames(video, where=where, odd=lambda *found: odd.append(found))
    images = (decode_image(each, where=where, transparency=transparency) for each in video.frames)
    return [np.asarray(image) for image in images]


def video_size(video: AnyVideo, *, where: str) -> tuple[int, int]:
    """Height and width of the frames; ValueError where one is of another size."""
    if isinstance(video, VideoClip):
        return video.header.height, video.header.width
    sizes = [image_size(frame, where=where) for frame in video.frames]
    height, width = sizes[0]
    for frame, size in zip(video.frames, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"{where}: frame {frame} is {size[0]} x {size[1]} pixels, but the video's first"
                f" frame is {height} x {width}: give all frames the same size."
            )
    return height, width


def _load(processor: Processor, style: VideoStyle) -> Any:
    # Importing them imports torchvision, which takes long and which images do without.
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    kind, other = Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    if style.timestamps:
        kind, other = other, kind
    # A file for images serves videos as well in folders of Qwen2.5-VL, whose limits are per frame.
    others = {} if style.timestamps else read_json(processor.folder / IMAGE_FILE)
    config = _own_config(processor.folder) or others
    if not config:
        raise ValueError(
            f"the row has a video, but there is no video processor in {processor.folder}: copy"
            f" {VIDEO_FILE} from the model that this folder belongs to."
        )
    if config.get("video_processor_type") == other.__name__:
        raise ValueError(
            f"the video processor in {processor.folder} is a {other.__name__}, but this"
            f" model takes a {kind.__name__}: name the folder that belongs to this model."
        )
    transform = kind(**config)
    for name, value in (
        ("patch_size", processor.vision.patch_size),
        ("temporal_patch_size", processor.vision.temporal_patch_size),
        ("merge_size", processor.vision.spatial_merge_size),
    ):
        if getattr(transform, name) != value:
            raise ValueError(
                f"in {processor.folder}, {name} is {getattr(transform, name)} for videos"
                f" but {value} for images: one encoder takes both, so make them equal."
            )
    with told(f"the video processor in {processor.folder} has ", "."):
        require_scaling(transform)
    # Unset means False, with a warning for each process.
    transform.cap_pixels_per_frame = bool(transform.cap_pixels_per_frame)
    return transform
