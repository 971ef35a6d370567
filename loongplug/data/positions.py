"""The three position ids (time, height, width) of every token, as model families count."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]  # time, height, width in patches


def mrope_position_ids(
    input_ids: NDArray[np.int64],
    *,
    image_token_id: int | None,
    video_token_id: int | None,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    video_times: Sequence[NDArray[np.int64]] | None = None,
    after_times: bool = False,
    spatial_merge_size: int = 2,
) -> NDArray[np.int64]:
    """Position ids [3, n] for the tokens [n] of one sample without padding, as Qwen-VL's count.

    Text counts on in all three, and so do sounds. A picture's tokens lie on their merged grid,
    which starts where the text before it ended, and what follows starts after the grid's longer
    side in height or width. Grids are in patches, (time, height, width), in the order of their
    tokens.

    Without ``video_times`` (Qwen3-VL), a video is written frame by frame with a timestamp
    as text before each, so that each of its frames is a picture of its own. With them
    (Qwen2.5-VL), a video is one picture, whose frames are at its times, [frames] ascending from 0.
    With ``after_times`` (Qwen2.5-Omni), what follows starts after its last time as well.

    Raises ValueError when the tokens and the grids do not match.
    """
    merge = spatial_merge_size
    images = [_counted(*grid, merge) for grid in image_grids]
    if video_times is None:
        frames = ((high, wide) for time, high, wide in video_grids for _ in range(time))
        videos = [_counted(1, *sides, merge) for sides in frames]
    else:
        pairs = zip(video_times, video_grids, strict=True)
        videos = [_at_times(times, high, wide, merge) for times, (_, high, wide) in pairs]
    kinds = ((image_token_id, iter(images)), (video_token_id, iter(videos)))
    pictures = {token: each for token, each in kinds if token is not None}
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    token, position = 0, 0
    visual = np.flatnonzero(among(input_ids, pictures))
    while (at := int(visual.searchsorted(token))) < len(visual):  # the next outside of pictures
        start = int(visual[at])
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        kind = int(input_ids[start])
        if (picture := next(pictures[kind], None)) is None:
            raise ValueError(
                f"No grid for the picture at token {start}: give one grid for each picture."
            )
        token = start + picture.shape[1]
        found = np.count_nonzero(input_ids[start:token] == kind)
        if found != token - start:
            raise ValueError(
                f"The picture at token {start} has {found} tokens in the text, but its grid needs"
                f" {token - start}: write exactly as many."
            )
        np.add(picture, position, out=positions[:, start:token])
        position += int(picture[0 if after_times else 1 :, -1].max()) + 1  # the last is the largest
    positions[:, token:] = np.arange(position, position + len(input_ids) - token)
    for kind, rest in pictures.items():
        if left := len(list(rest)):
            raise ValueError(
                f"{left} more grids than pictures in the text for token {kind}: give one grid for"
                " each picture."
            )
    return positions


def plain_position_ids(tokens: int) -> NDArray[np.int64]:
    """Position ids [3, n] of a family that counts tokens alone: 0 to n - 1 in all three."""
    return np.broadcast_to(np.arange(tokens), (3, tokens)).copy()


def among(ids: NDArray[np.int64], few: Iterable[int]) -> NDArray[np.bool_]:
    """Where ``ids`` [n] are one of a ``few``, [n]; for a few in less time than np.isin."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for token in few:
        found |= ids == token
    return found


@lru_cache(maxsize=32)  # few sizes come again and again
def _counted(time: int, height: int, width: int, merge: int) -> NDArray[np.int64]:
    return _at_times(np.arange(time), height, width, merge)


def _at_times(times: NDArray[np.int64], height: int, width: int, merge: int) -> NDArray[np.int64]:
    """Positions [3, tokens] of a picture, counted from 0, by its sides in patches."""
    grid = np.empty((3, len(times), height // merge, width // merge), dtype=np.int64)
    grid[0] = times[:, None, None]
    grid[1] = np.arange(height // merge)[:, None]
    grid[2] = np.arange(width // merge)
    return grid.reshape(3, -1)
