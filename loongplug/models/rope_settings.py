"""How a text decoder turns its queries and keys by their positions; data, without torch."""

from dataclasses import dataclass

Section = tuple[int, int, int]  # pairs of channels for time, height, width


def interleaved_axes(section: Section) -> tuple[int, ...]:
    """The axis (0 time, 1 height, 2 width) of each frequency in Qwen3-VL.

    Frequency number 3k+1 (k < section[1]) turns with the height, number 3k+2 (k < section[2])
    with the width, and all others with time.
    """
    axes = [0] * sum(section)
    for axis in (1, 2):
        for number in range(axis, 3 * section[axis], 3):
            axes[number] = axis
    return tuple(axes)


def sectioned_axes(section: Section) -> tuple[int, ...]:
    """The axis of each frequency in Qwen2.5-VL: one stretch for each axis."""
    return tuple(axis for axis, length in enumerate(section) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slower turns for longer texts, as in Llama 3.1.

    ``original_max_position_embeddings`` is the length of text before. A frequency that turns
    ``high_freq_factor`` times or more in it stays, one that turns ``low_freq_factor`` times or
    less is divided by ``factor``, and between the two it is blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """Rotary positions of heads of ``channels`` channels.

    ``axes`` has, for each pair of channels, the axis of its position: 0 time, 1 height, 2 width.
    """

    channels: int
    base: float
    axes: tuple[int, ...]
    scaling: Llama3Scaling | None = None
