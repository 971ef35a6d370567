"""Qwen2-VL's image encoder and projector, and what builds them."""

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.encoder import blank_unit, encoder_config
from loongplug.models.features import Features
from loongplug.models.layers.inputs import embedded, pack_segments, rope_table
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.layers.specs import Backend, vision_layer_spec
from loongplug.models.patch_grids import frame_lengths, frame_rotary_angles, frame_sizes
from loongplug.models.projectors.modules import patch_merger
from loongplug.platform.devices import to_device
from qwen2_vl.config import Qwen2VisionConfig


def build_encoder(
    architecture: Qwen2VisionConfig,
    *,
    decoder: TransformerConfig,
    groups: ProcessGroupCollection,
    backend: Backend,
) -> "Qwen2VisionEncoder":
    """The encoder with the decoder's precision, over ``groups``."""
    config = encoder_config(
        architecture,
        decoder=decoder,
        tp=groups.tp.size(),
        normalization="LayerNorm",
        activation_func=quick_gelu,
        bias_activation_fusion=False,  # the fused kernel is for another GELU
    )
    return Qwen2VisionEncoder(config, architecture, backend=backend, pg_collection=groups)


def build_projector(
    architecture: ProjectorArchitecture,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> "Qwen2VisionProjector":
    """The projector behind an encoder of ``vision`` and ``config``."""
    return Qwen2VisionProjector(
        config,
        epsilon=architecture.layernorm_epsilon,
        block_patches=vision.spatial_merge_size**2,
        output_size=output_size,
        pg_collection=groups,
    )


class Qwen2VisionEncoder(MegatronModule):
    """ViT over packed images of any number and size; attention stays within a frame."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen2VisionConfig,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        self.patch_embed = nn.Linear(architecture.row_values, architecture.hidden_size, bias=False)
        if config.perform_initialization:
            config.init_method(self.patch_embed.weight)
        self.blocks = TransformerBlock(
            config=config,
            spec=vision_layer_spec(config, backend=backend),
            post_layer_norm=False,
            pg_collection=pg_collection,
        )

    def blank_unit(self) -> MediaInput:
        """What an empty unit is computed as."""
        return blank_unit(self.architecture, device=self.patch_embed.weight.device)

    def forward(self, vision: MediaInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all images of one unit: the last layer's states [patches, hidden], no taps."""
        weight = self.patch_embed.weight
        hidden_states = embedded(vision, self.patch_embed)[:, None]
        angles = to_device(self._angles(vision.grids), weight.device)
        states = self.blocks(
            hidden_states=hidden_states,  # [patches, 1, hidden]
            attention_mask=None,
            rotary_pos_emb=rope_table(angles[:, None, None, :], dtype=torch.float32),
            packed_seq_params=pack_segments(frame_lengths(vision.grids), device=weight.device),
        )
        return states[:, 0], []

    def _angles(self, grid_thw: Tensor) -> Tensor:
        """Rotary angles of all patches, [patches, head_dim / 2] float32, on the host."""
        architecture = self.architecture
        return torch.cat(
            [
                frame_rotary_angles(
                    height,
                    width,
                    head_dim=architecture.hidden_size // architecture.num_attention_heads,
                    base=architecture.rotary_base,
                    merge=architecture.spatial_merge_size,
                )
                for height, width in frame_sizes(grid_thw)
            ]
        )


class Qwen2VisionProjector(MegatronModule):
    """The patch merger, with LayerNorm on single patches."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        epsilon: float,
        block_patches: int,
        output_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.merger = patch_merger(
            config,
            norm=LayerNorm(config, config.hidden_size, eps=epsilon),
            norm_blocks=False,
            block_patches=block_patches,
            output_size=output_size,
            tp_group=pg_collection.tp,
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        return Features(embeddings=self.merger(states, []).embeddings, deepstack=())
