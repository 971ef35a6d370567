"""The Qwen2.5-VL image encoder: patches in, patch states out.

Windows tile each frame from its top left corner, row by row. Those at the right and the lower edge
hold what is left of it. Merge blocks stay whole, and frames stay contiguous. Megatron's
TransformerBlock gives all layers the same segments: those of windows come with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.encoder import EncoderInput, HandedOn, StagedEncoder
from loongplug.models.layers.inputs import (
    PackedSegments,
    embedded,
    input_for_recompute,
    pack_segments,
    rope_table,
)
from loongplug.models.layers.norm import RMSNorm
from loongplug.models.layers.specs import Backend, vision_layer_spec
from loongplug.models.patch_grids import FrameGeometry, FrameTables, frame_lengths
from loongplug.models.projectors.modules import VisionProjector
from loongplug.models.qwen2_5_vl import Qwen25VisionConfig
from loongplug.platform.devices import to_device


def frame_windows(height: int, width: int, *, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The windows of one frame of ``height x width`` patches, ``side`` merged tokens a side.

    Gives the frame's tokens in their order, [tokens], and the patches of each, [windows]; int64.
    """
    rows, columns = height // merge, width // merge
    windows_per_row = -(-columns // side)
    token = torch.arange(rows * columns)
    window = token // columns // side * windows_per_row + token % columns // side
    order = torch.argsort(window, stable=True)  # within a window, row by row
    return order, torch.bincount(window) * merge**2


def permute_blocks(patches: Tensor, order: Tensor) -> Tensor:
    """``patches`` [patches, ...] with block ``order[i]`` in place i; ``order`` is [blocks]."""
    blocks = patches.unflatten(0, (order.shape[0], -1))
    return blocks.index_select(0, order).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """The windows of one unit. ``order[i]`` is the token that comes to place i, [tokens] int64.

    ``inverse`` undoes it. Lengths are in patches. ``angles`` are those of
    :func:`~loongplug.models.patch_grids.frame_rotary_angles`, in the windows' order,
    [patches, head_dim / 2] float32.
    """

    order: Tensor
    inverse: Tensor
    angles: Tensor
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]


class WindowGeometry(FrameGeometry):
    """Plans the windows of one model's units; ``side`` is a window's, in merged tokens.

    A frame takes about 160 bytes per patch.
    """

    def plan(self, grid_thw: Tensor, device: torch.device) -> WindowPlan:
        """The windows of a unit with the patch grids ``grid_thw`` [images, 3], at least one.

        Tensors are on ``device``.
        """
        frames = self.frames(grid_thw, device)
        orders, angles = zip(*(each.tables for each in frames), strict=True)
        # The first token of each one's frame: [all tokens].
        tokens = [each.shape[1] for each in orders]
        *starts, count = accumulate(tokens, initial=0)
        start, times = to_device(torch.tensor([starts, tokens]), device)  # [frames] each
        first = torch.repeat_interleave(start, times, output_size=count)
        order, inverse = torch.cat(orders, dim=1) + first
        return WindowPlan(
            order=order,
            inverse=inverse,
            angles=torch.cat(angles),
            window_lengths=tuple(length for each in frames for length in each.windows),
            frame_lengths=tuple(frame_lengths(grid_thw)),
        )

    def _of_frame(self, height: int, width: int) -> FrameTables:
        order, lengths = frame_windows(height, width, merge=self._merge, side=self._side)
        angles = permute_blocks(self._angles(height, width), order)
        return FrameTables(
            tables=(torch.stack([order, torch.argsort(order)]), angles),
            windows=tuple(lengths.tolist()),
        )


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

    Both are those of the same tokens, as for :func:`~loongplug.models.layers.inputs.pack_segments`.
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


class Qwen25VisionEncoder(StagedEncoder[Qwen25VisionConfig]):
    """ViT over packed images of any number and size; attention stays within a window or a frame."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen25VisionConfig,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, architecture, backend=backend, pg_collection=pg_collection)
        self._geometry = WindowGeometry(
            side=architecture.window_tokens,
            head_dim=architecture.hidden_size // architecture.num_attention_heads,
            base=architecture.rotary_base,
            merge=architecture.spatial_merge_size,
        )
        if self.stage.first:
            # A 3D convolution whose stride is its kernel is a linear map of each patch.
            inputs = architecture.row_values
            self.patch_embed = nn.Linear(inputs, architecture.hidden_size, bias=False)
            if config.perform_initialization:
                config.init_method(self.patch_embed.weight)
        full = vision_layer_spec(config, backend=backend)
        windowed = vision_layer_spec(config, backend=backend, layer_class=WindowTransformerLayer)
        self.blocks = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[
                    full if number in architecture.full_attention_layers else windowed
                    for number in self.stage.layers
                ]
            ),
            post_layer_norm=False,
            pg_collection=pg_collection,
        )

    @classmethod
    def megatron_settings(cls, architecture: Qwen25VisionConfig) -> dict[str, Any]:
        """RMSNorm and SwiGLU."""
        return {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu}

    def forward(self, vision: EncoderInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all images of one unit, or go on from where the stage before has come.

        Returns:
            the last layer's states, [patches, hidden], and no taps: in the patches' own order, from
            a stage that is not the last in that of the windows.
        """
        device = next(self.parameters()).device
        plan = self._geometry.plan(vision.grids, device)
        if isinstance(vision, HandedOn):
            hidden_states = vision.states[:, None]
        else:
            # Pixels need no gradient, so that moving them costs no backward pass.
            order = plan.order  # the embedding's backward needs it, and no more of the plan
            patches = embedded(
                vision, self.patch_embed, order=lambda rows: permute_blocks(rows, order)
            )
            hidden_states = patches[:, None]  # [patches, 1, hidden]
        states = self.blocks(
            hidden_states=input_for_recompute(hidden_states, layers=self.blocks),
            attention_mask=None,
            rotary_pos_emb=rope_table(plan.angles[:, None, None, :], dtype=torch.float32),
            packed_seq_params=pack_windows(
                frames=plan.frame_lengths, windows=plan.window_lengths, device=device
            ),
        )[:, 0]
        return (permute_blocks(states, plan.inverse) if self.stage.last else states), []


build_encoder = Qwen25VisionEncoder.build


def build_projector(
    architecture: ProjectorArchitecture, *, vision: VisionArchitecture, **around: Any
) -> VisionProjector:
    """The patch merger, with RMSNorm on single patches."""
    assert not vision.taps(), "this family has no deepstack"
    return VisionProjector(architecture, vision=vision, norm=RMSNorm, **around)
