"""How variable-length segments lie in a packed batch, planned once on the host."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from loongplug.models.layers.context.row import ContextRow
from loongplug.platform.devices import to_device

_LONGEST = 128  # tokens; what the longest segment is said to be is a multiple


@dataclass(frozen=True)
class PackedLayout:
    """The segments of a pack by length, each group to be computed as one batch.

    ``lengths`` are the tokens of each segment in pack order, empty ones included. ``groups`` hold
    the indices of the others by length, ascending, ordered by their first segment.
    """

    lengths: tuple[int, ...]
    groups: Mapping[int, Sequence[int]]

    @property
    def tokens(self) -> int:
        """Tokens in the pack."""
        return sum(self.lengths)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "PackedLayout":
        """Plan segments of these ``lengths``. Raises ValueError for a negative length."""
        lengths = tuple(lengths)
        by_length: dict[int, list[int]] = {}
        for segment, length in enumerate(lengths):
            if length < 0:
                raise ValueError(
                    f"Segment {segment} of a pack has length {length}; lengths must be 0 or more."
                )
            if length:
                by_length.setdefault(length, []).append(segment)
        return cls(lengths, by_length)


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters together with the host's plan of the segments."""

    layout: PackedLayout | None = None
    padding: int = 0  # tokens of the last segment, where that is padding
    context: ContextRow | None = None  # of which this rank holds a part


def pack_segments(
    lengths: Sequence[int], *, device: torch.device | str, padding: int = 0
) -> PackedSegments:
    """Packed-sequence parameters (``thd``) of segments that each attend to themselves only.

    Args:
        lengths: tokens of each segment, known on the host; none at all makes an empty pack.
        device: where ``cu_seqlens`` (int32, [segments + 1]) go, for kernels that read them.
        padding: tokens behind the segments that are of no use. They become a segment as well,
            since some kernels leave what no segment covers undefined, gradients included.

    Call it once per microbatch and hand the result to every layer: nothing in the layers then
    waits for the device to learn the lengths.
    """
    layout = PackedLayout.of([*lengths, padding] if padding else lengths)
    cu_seqlens = torch.tensor(tuple(accumulate(layout.lengths, initial=0)), dtype=torch.int32)
    cu_seqlens = to_device(cu_seqlens, device)  # [segments + 1]
    # Rounded up: some kernels make a plan for each other longest segment that they meet.
    longest = -(-max(layout.lengths, default=0) // _LONGEST) * _LONGEST
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=layout,
        padding=padding,
    )


def layout_of(params: PackedSeqParams) -> PackedLayout:
    """The plan that ``params`` carry. Raises ValueError where :func:`pack_segments` made none."""
    if isinstance(params, PackedSegments) and params.layout is not None:
        return params.layout
    raise ValueError(
        "Packed attention got parameters without a plan of their segments: make them with "
        "loongplug.models.layers.packed.pack_segments."
    )
