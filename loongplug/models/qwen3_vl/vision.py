"""The Qwen3-VL image encoder: patches in, patch states and deepstack taps out.

Position taps and rotary angles follow from the patch grids alone; tables are made on the host.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import ProjectorArchitecture
from loongplug.models.encoder import EncoderInput, HandedOn, StagedEncoder
from loongplug.models.layers.inputs import embedded, input_for_recompute, pack_segments, rope_table
from loongplug.models.layers.specs import Backend, vision_layer_spec
from loongplug.models.patch_grids import (
    FrameGeometry,
    FrameTables,
    frame_lengths,
    patch_coordinates,
)
from loongplug.models.projectors.modules import VisionProjector
from loongplug.models.qwen3_vl import Qwen3VisionConfig


def _axis_taps(size: int, *, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Taps of ``size`` points spread over ``side`` table entries: lower, upper, upper's share.

    Both ends meet the table's ends (align_corners), as Qwen3-VL resamples its position table.
    """
    points = torch.linspace(0, side - 1, size, dtype=torch.float64)
    lower = points.floor().to(torch.int64)
    return lower, (lower + 1).clamp(max=side - 1), (points - lower).float()


def frame_position_taps(height: int, width: int, *, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Bilinear taps of one frame into a ``side x side`` position table.

    Returns table rows [patches, 4] int64 and their weights [patches, 4] float32.
    """
    row, column = patch_coordinates(height, width, merge=merge)
    top, bottom, down = (axis[row] for axis in _axis_taps(height, side=side))
    left, right, along = (axis[column] for axis in _axis_taps(width, side=side))
    upper, lower = top * side, bottom * side
    taps = torch.stack([upper + left, upper + right, lower + left, lower + right], dim=1)
    up, back = 1 - down, 1 - along
    weights = torch.stack([up * back, up * along, down * back, down * along], dim=1)
    return taps, weights


class PackedGeometry(FrameGeometry):
    """Geometry of one model's units; ``side`` is the position table's.

    A frame takes about 200 bytes per patch.
    """

    def packed(self, grid_thw: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Tables of all frames of a unit with the grids ``grid_thw`` [images, 3], at least one.

        Returns the two of :func:`frame_position_taps`, and the angles of
        :func:`~loongplug.models.patch_grids.frame_rotary_angles`, packed along the patches, on
        ``device``.
        """
        tables = [each.tables for each in self.frames(grid_thw, device)]
        return tuple(torch.cat(parts) for parts in zip(*tables, strict=True))

    def _of_frame(self, height: int, width: int) -> FrameTables:
        taps = frame_position_taps(height, width, side=self._side, merge=self._merge)
        return FrameTables(tables=(*taps, self._angles(height, width)))


class Qwen3VisionEncoder(StagedEncoder[Qwen3VisionConfig]):
    """ViT over packed images of any number and size; attention stays within a frame."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen3VisionConfig,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, architecture, backend=backend, pg_collection=pg_collection)
        self._geometry = PackedGeometry(
            side=round(architecture.num_position_embeddings**0.5),
            head_dim=architecture.hidden_size // architecture.num_attention_heads,
            base=architecture.rotary_base,
            merge=architecture.spatial_merge_size,
        )
        if self.stage.first:
            self._build_embeddings()
        self.blocks = TransformerBlock(
            config=config,
            spec=vision_layer_spec(config, backend=backend),
            post_layer_norm=False,
            pg_collection=pg_collection,
        )

    @classmethod
    def megatron_settings(cls, architecture: Qwen3VisionConfig) -> dict[str, Any]:
        """LayerNorm and GELU in its tanh approximation."""
        gelu = partial(F.gelu, approximate="tanh")
        return {"normalization": "LayerNorm", "activation_func": gelu}

    def _build_embeddings(self) -> None:
        config, architecture = self.config, self.architecture
        # A 3D convolution whose stride is its kernel is a linear map of each patch.
        self.patch_embed = nn.Linear(architecture.row_values, architecture.hidden_size)
        self.position_embedding = nn.Embedding(
            architecture.num_position_embeddings, architecture.hidden_size
        )
        if config.perform_initialization:
            config.init_method(self.patch_embed.weight)
            nn.init.zeros_(self.patch_embed.bias)
            config.init_method(self.position_embedding.weight)

    def forward(self, vision: EncoderInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all images of one unit, or go on from where the stage before has come.

        Returns:
            the last layer's states [patches, hidden] and the states behind each of
            ``deepstack_layers``, in their order, [patches, hidden] each; of layers so far.
        """
        device = next(self.parameters()).device
        taps, shares, angles = self._geometry.packed(vision.grids, device)
        before: tuple[Tensor, ...] = ()
        if isinstance(vision, HandedOn):
            hidden_states, before = vision.states[:, None], vision.taps
        else:
            hidden_states = self._embed(vision, taps, shares)[:, None]  # [patches, 1, hidden]
        deepstack_layers = self.architecture.deepstack_layers
        output = self.blocks(
            hidden_states=input_for_recompute(hidden_states, layers=self.blocks),
            attention_mask=None,
            rotary_pos_emb=rope_table(angles[:, None, None, :], dtype=torch.float32),
            packed_seq_params=pack_segments(frame_lengths(vision.grids), device=device),
            extract_layer_indices=set(deepstack_layers),
        )
        states, tapped = output if deepstack_layers else (output, [])
        return states[:, 0], [*before, *(tap[:, 0] for tap in tapped)]

    def _embed(self, vision: MediaInput, taps: Tensor, shares: Tensor) -> Tensor:
        """Patch embeddings plus the interpolated position table, [patches, hidden]."""
        table_rows = self.position_embedding(taps)  # [patches, 4, hidden]
        positions = (table_rows * shares[:, :, None]).sum(dim=1)
        # Called, not only read: parameters that are gathered meanwhile are waited for by a hook.
        patches = embedded(vision, self.patch_embed)
        return patches + positions.to(patches.dtype)


build_encoder = Qwen3VisionEncoder.build


def build_projector(architecture: ProjectorArchitecture, **around: Any) -> VisionProjector:
    """The patch merger and the deepstack mergers, with torch's own LayerNorm."""

    def norm(config: TransformerConfig, width: int, *, eps: float) -> nn.Module:
        return nn.LayerNorm(width, eps=eps)

    return VisionProjector(architecture, norm=norm, **around)
