"""Video files through PyAV, which the extra ``video`` installs: headers and chosen frames."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.av_files import opened_stream
from loongplug.data.conversation import VideoClip, VideoHeader
from loongplug.data.media_files import MediaFile

_MOST_PIXELS = 178_956_970  # of a frame: where Pillow, too, speaks of a decompression bomb
_MOST_APART = 1.05  # frames between a stamp, which is rounded, and index / rate


def video_header(path: MediaFile, *, where: str) -> VideoHeader:
    """The header of a file; its first frame knows how it is turned, and packets may be counted."""
    with opened_stream("video", path, where=where, header=True) as (container, stream):
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


def decode_frames(
    clip: VideoClip, *, where: str, odd: Callable[[str, str], None] = lambda kind, said: None
) -> list[NDArray[np.uint8]]:
    """The frames of the clip, upright and in RGB, [height, width, 3] each.

    Where the header counts more frames than there are, the last one stands for those behind it;
    ValueError where less than half of them can be decoded. ``odd`` hears what is so of the file.
    """
    wanted, taken = frozenset(clip.indices), dict[int, NDArray[np.uint8]]()
    count, start, apart, total = 0, None, 0.0, clip.header.frames
    with opened_stream("video", clip.path, where=where) as (container, stream):
        from av.video.reformatter import VideoReformatter

        stream.thread_type = "AUTO"
        # An index has a header without the file.
        if stream.frames not in (0, total):
            raise ValueError(
                f"it has {stream.frames} frames now, and had {total}: do not change it"
            )
        # PyAV keeps one with its threads, for which processes that are forked later would wait.
        reformatter = VideoReformatter()
        for frame in islice(container.decode(stream), max(wanted) + 1):
            start = frame.time if start is None else start
            if count in wanted:
                taken[count] = _upright(frame, reformatter)
                if frame.time is not None and container.format.name != "avi":  # it has none
                    apart = max(apart, abs((frame.time - start) * clip.header.fps - count))
            count += 1
        if (ends_early := count <= max(wanted)) and 2 * count < total:
            raise ValueError(f"{count} frames can be decoded: the header says {total}")
    told = f"{where}: video {clip.path}: "
    if ends_early:
        taken[count - 1] = _upright(frame, reformatter)
        said = f"its header counts {total} frames, but {count} can be decoded"
        odd("fewer frames than its header counts", f"{told}{said}: the last stands for the rest.")
    if apart > _MOST_APART:
        said = f"its stamps are up to {apart:.1f} frames from index / rate, its time"
        odd("stamps more than a frame from index / rate", f"{told}{said}.")
    return [taken[min(index, count - 1)] for index in clip.indices]


def _upright(frame: Any, reformatter: Any) -> NDArray[np.uint8]:
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.ascontiguousarray(np.rot90(pixels, k=round(frame.rotation / 90) % 4))
