"""The three position ids (time, height, width) of every token, as model families count."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    video_time_steps: Sequence[float] | None = None,
    spatial_merge_size: int = 2,
) -> NDArray[np.int64]:
    """Position ids [3, n] for the tokens [n] of one sample without padding, as Qwen-VL's count.

    Text counts on in all three, and so do sounds. A picture's tokens lie on their merged grid,
    which starts where the text before it ended, and what follows starts after the grid's longer
    side in height or width. Grids are in patches, (time, height, width), in the order of their
    tokens.

    Without ``video_time_steps`` (Qwen3-VL), a video is written frame by frame with a timestamp
    as text before each, so that each of its frames is a picture of its own. With them
    (Qwen2.5-VL), a video is one picture, and its i-th frame is at ``int(i * step)``, computed in
    float32.

    Raises ValueError when the tokens and the grids do not match.
    """
    images = [_Picture.merged(grid, spatial_merge_size) for grid in image_grids]
    if video_time_steps is None:
        frames = [(1, height, width) for time, height, width in video_grids for _ in range(time)]
        videos = [_Picture.merged(grid, spatial_merge_size) for grid in frames]
    else:
        videos = [
            _Picture.merged(grid, spatial_merge_size, time_step=step)
            for grid, step in zip(video_grids, video_time_steps, strict=True)
        ]
    kinds = ((image_token_id, iter(images)), (video_token_id, iter(videos)))
    pictures = {token: each for token, each in kinds if token is not None}
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    token, position = 0, 0
    visual = np.flatnonzero(np.isin(input_ids, list(pictures)))
    while (at := int(visual.searchsorted(token))) < len(visual):  # the next outside of pictures
        start = int(visual[at])
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        kind = int(input_ids[start])
        if (picture := next(pictures[kind], None)) is None:
            raise ValueError(
                f"No grid for the picture at token {start}: give one grid for each picture."
            )
        token = start + picture.time * picture.height * picture.width
        found = np.count_nonzero(input_ids[start:token] == kind)
        if found != token - start:
            raise ValueError(
                f"The picture at token {start} has {found} tokens in the text, but its grid needs"
                f" {token - start}: write exactly as many."
            )
        picture.write(positions[:, start:token], start=position)
        position += max(picture.height, picture.width)
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


@dataclass(frozen=True)
class _Picture:
    """A run of visual tokens: its sides in tokens, and what its time axis counts per frame."""

    time: int
    height: int
    width: int
    time_step: float

    @classmethod
    def merged(cls, grid: Grid, merge: int, *, time_step: float = 1.0) -> "_Picture":
        time, height, width = grid
        return cls(time, height // merge, width // merge, time_step)

    def write(self, positions: NDArray[np.int64], *, start: int) -> None:
        """Fill ``positions`` [3, tokens] of the picture, which begins at position ``start``."""
        grid = positions.reshape(3, self.time, self.height, self.width)  # a view
        if self.time == 1:
            grid[0] = start
        else:
            # float32, as in transformers: near a whole number, float64 would count another one.
            times = np.arange(self.time, dtype=np.float32) * np.float32(self.time_step)
            grid[0] = (times.astype(np.int64) + start)[:, None, None]
        grid[1] = np.arange(start, start + self.height)[:, None]
        grid[2] = np.arange(start, start + self.width)
