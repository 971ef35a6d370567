"""Video files through PyAV, which the extra ``video`` installs: headers and chosen frames."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.av_files import AvKind, opened_stream
from loongplug.data.conversation import VideoClip
from loongplug.data.media_files import MediaFile

_MOST_PIXELS = 178_956_970  # of a frame: where Pillow, too, speaks of a decompression bomb
# All containers that are opened, by FFmpeg's names. Its playlists, patterns of names and scripts
# (hls, concat, image2) lead to other files, and to the network.
CONTAINERS = ("mov", "matroska", "webm", "avi", "mpegts", "mpeg", "ogg", "flv", "asf", "gif")
_VIDEO = AvKind(
    name="video",
    containers=CONTAINERS,
    without_av="is a video file, and PyAV, which reads them, is not installed: pip install"
    " 'loongplug[video]', or give the video's frames as image files",
    damaged="is damaged or no video of a kind that is read",
    cure="replace the file, or convert it to MP4",
)


@dataclass(frozen=True)
class VideoHeader:
    """What a file says of its first video stream; sides are those of the upright frames."""

    frames: int
    fps: float
    height: int
    width: int


def video_header(path: MediaFile, *, where: str) -> VideoHeader:
    """Read the container's header and decode the first frame, which knows how it is turned.

    Where the container does not say how many frames there are, their packets are counted; none
    is decoded. Raises ValueError with ``where`` for a file that is missing, damaged or no video.
    """
    with opened_stream(_VIDEO, path, where=where, header=True) as (container, stream):
        fps = float(stream.average_rate or 0)
        pixels = stream.codec_context.width * stream.codec_context.height
        if pixels > _MOST_PIXELS:
            raise ValueError(f"frames of {pixels} pixels are above the limit of {_MOST_PIXELS}")
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        if frames < 1 or fps <= 0:
            raise ValueError(f"{frames} frames at {fps} frames per second")
        container.seek(0)
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError("no frame can be decoded")
        height, width = first.height, first.width
        if first.rotation % 180:
            height, width = width, height
    return VideoHeader(frames=frames, fps=fps, height=height, width=width)


def decode_frames(clip: VideoClip, *, where: str) -> list[NDArray[np.uint8]]:
    """The frames of the clip, upright and in RGB, [height, width, 3] each.

    Decodes the file up to the last of them. Raises ValueError with ``where`` for a file that is
    missing, damaged, or shorter than its header says.
    """
    wanted = iter(clip.indices)
    found: list[NDArray[np.uint8]] = []
    index = next(wanted, None)
    with opened_stream(_VIDEO, clip.path, where=where) as (container, stream):
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            if index is None:
                break
            if number == index:
                found.append(_upright(frame))
                index = next(wanted, None)
        if index is not None:
            raise ValueError(f"frame {index} is missing: the header says {clip.total_frames}")
    return found


def _upright(frame: Any) -> NDArray[np.uint8]:
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, k=round(frame.rotation / 90) % 4))
