"""What layers are given besides their states, made once per microbatch: the segments of a pack, a
table of rope; states that layers can be recomputed from, and those that media are embedded as.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loongplug.data.microbatch import MediaInput
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.rope_settings import RopeSettings
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
        """Plan segments of these ``lengths``."""
        lengths = tuple(lengths)
        by_length: dict[int, list[int]] = {}
        for segment, length in enumerate(lengths):
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

    ``cu_seqlens`` go to the ``device``, for kernels that read them. ``padding`` behind the segments
    becomes one as well, since some kernels leave what no segment covers undefined, gradients too.
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
    """The plan that ``params`` carry, which :func:`pack_segments` made."""
    assert isinstance(params, PackedSegments), params
    assert params.layout is not None
    return params.layout


def rope_table(angles: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of rotary ``angles``, in the form RotarySelfAttention takes.

    Angles are [s, b or 1, 1, dim / 2] float32, one for each pair of channels i and i + dim / 2; the
    rotation is computed in ``dtype``. Gives cos, cos, -sin, sin as one tensor [s, b or 1, 1,
    2 * dim], which passes through recompute and schedules as any ``rotary_pos_emb`` does.
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)


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
        """``dtype`` is the one the rotation is computed in."""
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


def embedded(
    media: MediaInput,
    layer: nn.Module,
    *,
    order: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """What ``layer`` makes of the media's rows in ``order``; its backward makes these again.

    So nothing holds the rows between the two, only what is loaded of them. ``layer`` and ``order``
    draw nothing at random.
    """
    rows_of, weight = media.rows_of, layer.get_parameter("weight")

    def compute(loaded: Tensor) -> Tensor:
        return layer(order(rows_of(loaded).to(weight.dtype)))

    # A layer that is frozen keeps nothing.
    return made_again(compute, media.loaded) if weight.requires_grad else compute(media.loaded)


def made_again(compute: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """``compute(given)``, which saves ``given`` alone: what else backward needs it makes again.

    No dropout may be in it.
    """
    return checkpoint(compute, given, use_reentrant=False, preserve_rng_state=False)


def input_for_recompute(hidden_states: Tensor, *, layers: nn.Module) -> Tensor:
    """``hidden_states`` such that recomputed ``layers`` have gradients, any shape and dtype.

    autograd looks at a recomputed layer's inputs alone: where none of them needs a gradient,
    behind a frozen embedding for one, it would keep nothing of the layer, and the parameters
    would get no gradient, without an error. Such an input is made to need one. Frozen layers,
    and those that keep their activations, take it as it is.
    """
    config: TransformerConfig = layers.config
    if (
        config.recompute_granularity is not None
        and torch.is_grad_enabled()
        and not hidden_states.requires_grad
        and any(parameter.requires_grad for parameter in layers.parameters())
    ):
        hidden_states.requires_grad_()
    return hidden_states
