"""Build one pipeline stage of a Qwen2.5-VL model from its architecture."""

from collections.abc import Mapping

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import functional as F

from loongplug.models.decoder import DecoderConfig
from loongplug.models.layers.specs import Backend, decoder_layer_spec
from loongplug.models.mrope import sectioned_axes
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen2_5_vl.config import Qwen25VLConfig
from loongplug.models.qwen2_5_vl.projector import Qwen25VisionProjector
from loongplug.models.qwen2_5_vl.vision import Qwen25VisionEncoder
from loongplug.models.stage import EncoderAndProjector, build_stage, start_like_the_family
from loongplug.models.vision_encoder import vision_transformer_config
from loongplug.parallel.module_state import ModuleState


def build_model(
    model: Qwen25VLConfig,
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
    model: Qwen25VLConfig,
    config: DecoderConfig,
    *,
    groups: ProcessGroupCollection,
    backend: Backend,
) -> EncoderAndProjector:
    vision_config = vision_transformer_config(
        model.image_encoder,
        decoder=config,
        tp=groups.tp.size(),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=config.bias_activation_fusion,
    )
    encoder = Qwen25VisionEncoder(
        vision_config, model.image_encoder, backend=backend, pg_collection=groups
    )
    projector = Qwen25VisionProjector(
        vision_config,
        block_patches=model.image_encoder.spatial_merge_size**2,
        output_size=model.foundation.hidden_size,
        epsilon=model.image_projector.layernorm_epsilon,
        pg_collection=groups,
    )
    return encoder, projector
