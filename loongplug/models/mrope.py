"""Interleaved multimodal rotary position embedding (Qwen3-VL)."""

import torch
from torch import Tensor, nn

from loongplug.models.layers.rope import rope_table


class InterleavedMultimodalRotary(nn.Module):
    """Rotary angles from three position axes whose frequencies alternate channel by channel.

    Of the ``kv_channels / 2`` frequencies, number 3k+1 (k < section[1]) turns with the height,
    number 3k+2 (k < section[2]) with the width, and all others with time. It takes the place of
    Megatron's MultimodalRotaryEmbedding, which gives each axis one contiguous section.
    """

    def __init__(
        self,
        *,
        kv_channels: int,
        base: float,
        section: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        """``dtype`` is the one the rotation is computed in."""
        super().__init__()
        half = kv_channels // 2
        if sum(section) != half:
            raise ValueError(
                f"mrope_section {list(section)} sums to {sum(section)}, expected kv_channels / 2 = "
                f"{half}: set the three sections of the foundation so that they sum to {half}."
            )
        self._inverse_host = 1.0 / base ** (
            torch.arange(0, kv_channels, 2, dtype=torch.float32) / kv_channels
        )
        axis = torch.zeros(half, dtype=torch.int64)
        for number in (1, 2):
            axis[number : 3 * section[number] : 3] = number
        self._axis_host = axis
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._dtype = dtype

    def forward(
        self,
        position_ids: Tensor,
        mrope_section: list[int],
        cp_group: torch.distributed.ProcessGroup | None = None,
    ) -> Tensor:
        """The rope table [s, b, 1, 2 * kv_channels] of ``position_ids`` [3, b, s].

        The second and third argument are those of the class it stands in for; the sections are
        the ones given at construction.
        """
        device = position_ids.device
        if device not in self._on_device:
            self._on_device[device] = (self._inverse_host.to(device), self._axis_host.to(device))
        inverse, axis = self._on_device[device]
        per_channel = position_ids.float().permute(2, 1, 0)[:, :, axis]  # [s, b, kv_channels / 2]
        return rope_table((per_channel * inverse)[:, :, None, :], dtype=self._dtype)
