"""Rotary positions of the text decoder: every pair of channels turns with one of three axes."""

import math

import torch
from torch import Tensor, nn

from loongplug.models.layers.rope import rope_table
from loongplug.models.rope_settings import RopeSettings
from loongplug.platform.devices import to_device


def inverse_frequencies(rope: RopeSettings) -> Tensor:
    """Radians per position of each pair of channels, [channels / 2] float32, on the CPU."""
    # Plain CPU tensors, also while a model is built on the meta device.
    with torch.device("cpu"):
        inverse = 1.0 / rope.base ** (
            torch.arange(0, rope.channels, 2, dtype=torch.float32) / rope.channels
        )
    scaling = rope.scaling
    if scaling is None:
        return inverse
    # How often each turns in a text of the original length.
    turns = scaling.original_max_position_embeddings / (2 * math.pi / inverse)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / scaling.factor + kept * inverse


class MultimodalRotary(nn.Module):
    """Rotary angles from three position axes; in plain text, all pairs turn with the first.

    It takes the place of Megatron's MultimodalRotaryEmbedding, which gives each axis one
    contiguous section and makes its angles again in every layer.
    """

    def __init__(self, rope: RopeSettings, *, dtype: torch.dtype) -> None:
        """``dtype`` is the one the rotation is computed in.

        Raises:
            ValueError: there are not as many axes as pairs of channels.
        """
        super().__init__()
        if len(rope.axes) != rope.channels // 2:
            raise ValueError(
                f"mrope_section sums to {len(rope.axes)}, expected kv_channels / 2 = "
                f"{rope.channels // 2}: set the three sections of the foundation so that they do."
            )
        self._inverse_host = inverse_frequencies(rope)
        self._axes_host = torch.tensor(rope.axes, dtype=torch.int64, device="cpu")
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._dtype = dtype

    def forward(
        self,
        position_ids: Tensor,
        mrope_section: list[int],
        cp_group: torch.distributed.ProcessGroup | None = None,
    ) -> Tensor:
        """The rope table [s, b, 1, 2 * kv_channels] of ``position_ids`` [3, b, s].

        The second and third argument are those of the class it stands in for; the axes are the
        ones given at construction.
        """
        device = position_ids.device
        if device not in self._on_device:
            self._on_device[device] = (
                to_device(self._inverse_host, device),
                to_device(self._axes_host, device),
            )
        inverse, axes = self._on_device[device]
        per_channel = position_ids.float().permute(2, 1, 0)[:, :, axes]  # [s, b, kv_channels / 2]
        return rope_table((per_channel * inverse)[:, :, None, :], dtype=self._dtype)
