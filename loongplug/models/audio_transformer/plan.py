"""Where the frames of a unit's sounds and their states lie, on the host, from lengths alone.

All pieces of all sounds stand on one *line* of frames, so that one convolution serves them: silent
frames, which are zero, stand between them, and pieces start at even frames, so that every other
frame is the middle of a state's. A piece is what is convolved and attends by itself: a sound, or a
chunk of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loongplug.data.media_sizes import AudioSizes


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """What the encoder has to know of a unit, all on the host."""

    length: int  # frames of the line, even
    frames: Tensor  # [rows] int64: the frame of each row
    silent: Tensor  # [length, 1] bool: frames without a row
    states: Tensor  # [states] int64: half the frame in the middle of each state
    positions: Tensor  # [states] int64: counted from 0 in each piece
    segments: tuple[int, ...]  # states of each piece
    kept: Tensor  # [states that become tokens] int64: all but odd last ones, if states are pooled


def plan_unit(sounds: Sequence[int], *, sizes: AudioSizes, chunk: int | None) -> UnitPlan:
    """Of sounds with so many frames each, in chunks of ``chunk`` frames if any."""
    pieces = [piece for frames in sounds for piece in _pieces(frames, sizes=sizes, chunk=chunk)]
    starts, length = [], 0
    for rows, _ in pieces:
        starts.append(length)
        length += (rows + 2) // 2 * 2  # one silent frame or two
    frames = _ranges(starts, [rows for rows, _ in pieces])
    states = tuple(states for _, states in pieces)
    return UnitPlan(
        length=length,
        frames=frames,
        silent=torch.ones(length, 1, dtype=torch.bool).index_fill(0, frames, False),
        states=_ranges([start // 2 for start in starts], states),
        positions=_ranges([0] * len(pieces), states),
        segments=states,
        kept=_kept(sounds, sizes=sizes, states=sum(states)),
    )


def _pieces(frames: int, *, sizes: AudioSizes, chunk: int | None) -> list[tuple[int, int]]:
    """Rows and states of a sound's pieces."""
    if chunk is None:
        return [(frames + sizes.behind, sizes.states(frames))]
    whole, rest = divmod(frames, chunk)
    return [(each, sizes.states(each)) for each in [chunk] * whole + ([rest] if rest else [])]


def _kept(sounds: Sequence[int], *, sizes: AudioSizes, states: int) -> Tensor:
    """Pairs go over a whole sound, whatever its chunks."""
    if not sizes.pooled:
        return torch.arange(states)
    of_sounds = [sizes.states(frames) for frames in sounds]
    starts = [0, *accumulate(of_sounds)][: len(sounds)]
    return _ranges(starts, [2 * sizes.tokens(frames) for frames in sounds])


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Consecutive numbers from each start, [sum of lengths] int64."""
    return torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    )
