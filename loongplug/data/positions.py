"""Qwen3-VL's three position ids (time, height, width) of every token."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]  # time, height, width in patches


def mrope_position_ids(
    input_ids: NDArray[np.int64],
    *,
    image_token_id: int,
    video_token_id: int,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    spatial_merge_size: int = 2,
) -> NDArray[np.int64]:
    """Position ids [3, n] for the tokens [n] of one sample without padding.

    Text counts on in all three. A picture's tokens lie on their merged grid, which starts
    where the text before it ended, and what follows starts after the grid's longer side.
    Grids are in patches, (time, height, width), in the order of their tokens. A video is
    written frame by frame with a timestamp as text before each, so that each of its frames is
    a picture of its own.

    Raises ValueError when the tokens and the grids do not match.
    """
    pictures = {
        image_token_id: iter([_merged(grid, spatial_merge_size) for grid in image_grids]),
        video_token_id: iter(
            [
                _merged((1, height, width), spatial_merge_size)
                for time, height, width in video_grids
                for _ in range(time)
            ]
        ),
    }
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    token, position = 0, 0
    in_picture = (input_ids == image_token_id) | (input_ids == video_token_id)
    for start in np.flatnonzero(in_picture).tolist():
        if start < token:  # inside the picture before
            continue
        positions[:, token:start] = np.arange(start - token) + position
        position += start - token
        kind = int(input_ids[start])
        time, height, width = _next_picture(pictures[kind], start=start)
        token = start + time * height * width
        _require_run(input_ids, kind=kind, start=start, end=token)
        grid = np.indices((time, height, width)).reshape(3, -1)
        positions[:, start:token] = grid + position
        position += max(height, width)
    positions[:, token:] = np.arange(len(input_ids) - token) + position
    for kind, rest in pictures.items():
        if left := len(list(rest)):
            raise ValueError(
                f"{left} more grids than pictures in the text for token {kind}: give one grid for"
                " each picture."
            )
    return positions


def _merged(grid: Grid, merge: int) -> Grid:
    time, height, width = grid
    return time, height // merge, width // merge


def _next_picture(grids: Iterator[Grid], *, start: int) -> Grid:
    grid = next(grids, None)
    if grid is None:
        raise ValueError(
            f"No grid for the picture at token {start}: give one grid for each picture."
        )
    return grid


def _require_run(ids: NDArray[np.int64], *, kind: int, start: int, end: int) -> None:
    if end > len(ids) or not (ids[start:end] == kind).all():
        found = int((ids[start:end] == kind).sum())
        raise ValueError(
            f"The picture at token {start} has {found} tokens in the text, but its grid needs"
            f" {end - start}: write exactly as many."
        )
