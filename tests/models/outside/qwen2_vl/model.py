"""Qwen2-VL's modules, the Megatron arguments it decides, and the builder of a pipeline stage."""

from collections.abc import Mapping

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from loongplug.data.microbatch import VisionInput
from loongplug.models.decoder import DecoderConfig
from loongplug.models.decoder_arguments import decoder_arguments
from loongplug.models.features import VisionFeatures
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.layers.packed import pack_segments
from loongplug.models.layers.rope import rope_table
from loongplug.models.layers.specs import Backend, decoder_layer_spec, vision_layer_spec
from loongplug.models.mrope import sectioned_axes
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.patch_grids import frame_lengths, frame_rotary_angles, frame_sizes
from loongplug.models.patch_merger import PatchMerger
from loongplug.models.registry import ArchitectureArgument
from loongplug.models.stage import EncoderAndProjector, build_stage, start_like_the_family
from loongplug.models.vision_encoder import blank_unit, patch_values, vision_transformer_config
from loongplug.parallel.module_state import ModuleState
from loongplug.platform.transfers import to_device
from qwen2_vl.config import Qwen2VisionConfig, Qwen2VLConfig


def megatron_arguments(model: Qwen2VLConfig) -> dict[str, ArchitectureArgument]:
    """The decoder's architecture under the names of Megatron's namespace."""
    return decoder_arguments(model.foundation, fixed={"qk_layernorm": False, "add_qkv_bias": True})


def build_model(
    model: Qwen2VLConfig,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
    states: Mapping[str, ModuleState | None] | None = None,
) -> MultimodalModel:
    """One stage (or virtual chunk), as :func:`~loongplug.models.stage.build_stage` gives it."""
    start_like_the_family(config)
    return build_stage(
        model,
        config,
        layer_spec=decoder_layer_spec(config, backend=backend),
        rope_axes=sectioned_axes(model.foundation.mrope_section),
        build_encoder=lambda groups: _encoder_and_projector(
            model, config, groups=groups, backend=backend
        ),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        states=states,
        backend=backend,
    )


def _encoder_and_projector(
    model: Qwen2VLConfig,
    config: DecoderConfig,
    *,
    groups: ProcessGroupCollection,
    backend: Backend,
) -> EncoderAndProjector:
    vision_config = vision_transformer_config(
        model.image_encoder,
        decoder=config,
        tp=groups.tp.size(),
        normalization="LayerNorm",
        activation_func=quick_gelu,
        bias_activation_fusion=False,  # the fused kernel is for another GELU
    )
    encoder = Qwen2VisionEncoder(
        vision_config, model.image_encoder, backend=backend, pg_collection=groups
    )
    projector = Qwen2VisionProjector(vision_config, model, pg_collection=groups)
    return encoder, projector


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
        self.patch_embed = nn.Linear(
            patch_values(architecture), architecture.hidden_size, bias=False
        )
        if config.perform_initialization:
            config.init_method(self.patch_embed.weight)
        self.blocks = TransformerBlock(
            config=config,
            spec=vision_layer_spec(config, backend=backend),
            post_layer_norm=False,
            pg_collection=pg_collection,
        )

    def blank_unit(self) -> VisionInput:
        """What an empty unit is computed as."""
        return blank_unit(self.architecture, device=self.patch_embed.weight.device)

    def forward(self, vision: VisionInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all images of one unit: the last layer's states [patches, hidden], no taps."""
        weight = self.patch_embed.weight
        hidden_states = self.patch_embed(vision.pixels.to(weight.dtype))[:, None]
        angles = to_device(self._angles(vision.grid_thw), weight.device)
        states = self.blocks(
            hidden_states=hidden_states,  # [patches, 1, hidden]
            attention_mask=None,
            rotary_pos_emb=rope_table(angles[:, None, None, :], dtype=torch.float32),
            packed_seq_params=pack_segments(frame_lengths(vision.grid_thw), device=weight.device),
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
        model: Qwen2VLConfig,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        epsilon = model.image_projector.layernorm_epsilon
        self.merger = PatchMerger(
            config,
            norm=LayerNorm(config, config.hidden_size, eps=epsilon),
            norm_blocks=False,
            block_patches=model.image_encoder.spatial_merge_size**2,
            output_size=model.foundation.hidden_size,
            tp_group=pg_collection.tp,
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> VisionFeatures:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        return VisionFeatures(embeddings=self.merger(states), deepstack=())
