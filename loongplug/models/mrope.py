"""Multimodal rotary position embedding: every pair of channels turns with one of three axes."""

import torch
from torch import Tensor, nn

from loongplug.models.layers.rope import rope_table
from loongplug.platform.transfers import to_device

Section = tuple[int, int, int]  # pairs of channels for time, height, width


def interleaved_axes(section: Section) -> Tensor:
    """The axis (0 time, 1 height, 2 width) of each frequency in Qwen3-VL, [kv_channels / 2] int64.

    Frequency number 3k+1 (k < section[1]) turns with the height, number 3k+2 (k < section[2])
    with the width, and all others with time.
    """
    axes = torch.zeros(sum(section), dtype=torch.int64, device="cpu")
    for number in (1, 2):
        axes[number : 3 * section[number] : 3] = number
    return axes


def sectioned_axes(section: Section) -> Tensor:
    """The axis of each frequency in Qwen2.5-VL, [kv_channels / 2] int64: one stretch per axis."""
    lengths = torch.tensor(section, device="cpu")
    return torch.arange(3, device="cpu").repeat_interleave(lengths)


class MultimodalRotary(nn.Module):
    """Rotary angles from three position axes.

    It takes the place of Megatron's MultimodalRotaryEmbedding, which gives each axis one
    contiguous section and makes its angles again in every layer.
    """

    def __init__(self, *, kv_channels: int, base: float, axes: Tensor, dtype: torch.dtype) -> None:
        """``axes`` names each frequency's axis; ``dtype`` is the one the rotation is computed in.

        Raises:
            ValueError: there are not ``kv_channels / 2`` axes.
        """
        super().__init__()
        if len(axes) != kv_channels // 2:
            raise ValueError(
                f"mrope_section sums to {len(axes)}, expected kv_channels / 2 = "
                f"{kv_channels // 2}: set the three sections of the foundation so that they do."
            )
        # Plain CPU tensors, also while a model is built on the meta device.
        with torch.device("cpu"):
            self._inverse_host = 1.0 / base ** (
                torch.arange(0, kv_channels, 2, dtype=torch.float32) / kv_channels
            )
        self._axes_host = axes
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
