"""Window attention within Megatron's TransformerBlock, which gives all layers the same segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from loongplug.models.layers.packed import PackedSegments, pack_segments


@dataclass
class WindowedSegments(PackedSegments):
    """The segments of full attention, which carry those of window attention with them.

    An ordinary layer sees the former, a :class:`WindowTransformerLayer` takes the latter.
    """

    windows: PackedSegments | None = None


def pack_windows(
    *, frames: Sequence[int], windows: Sequence[int], device: torch.device | str
) -> WindowedSegments:
    """Segments of the lengths ``frames`` for full, ``windows`` for window attention.

    Both are those of the same tokens, as for :func:`~loongplug.models.layers.packed.pack_segments`.
    """
    assert sum(frames) == sum(windows), (sum(frames), sum(windows))
    full = pack_segments(frames, device=device)
    return WindowedSegments(**vars(full), windows=pack_segments(windows, device=device))


class WindowTransformerLayer(TransformerLayer):
    """An encoder layer whose attention stays within windows."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As TransformerLayer.forward, with ``packed_seq_params`` made by :func:`pack_windows`."""
        assert isinstance(packed_seq_params, WindowedSegments), packed_seq_params
        windows = packed_seq_params.windows
        return super().forward(hidden_states, *args, packed_seq_params=windows, **kwargs)
