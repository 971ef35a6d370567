"""Build one pipeline stage of a Qwen3-VL model from its architecture."""

from collections.abc import Mapping
from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch.nn import functional as F

from loongplug.models.decoder import DecoderConfig
from loongplug.models.deepstack import DeepstackTransformerLayer
from loongplug.models.layers.specs import Backend, decoder_layer_spec, vision_layer_spec
from loongplug.models.mrope import interleaved_axes
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.qwen3_vl.projector import Qwen3VisionProjector
from loongplug.models.qwen3_vl.vision import Qwen3VisionEncoder
from loongplug.models.stage import EncoderAndProjector, build_stage, start_like_the_family
from loongplug.models.vision_encoder import vision_transformer_config
from loongplug.parallel.module_state import ModuleState


def build_model(
    model: Qwen3VLConfig,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
    states: Mapping[str, ModuleState | None] | None = None,
) -> MultimodalModel:
    """One stage (or virtual chunk) of ``model``; see :func:`~loongplug.models.stage.build_stage`.

    Dense or with experts, as ``config`` says.
    """
    start_like_the_family(config)
    _carry_deepstack(config, features=len(model.image_encoder.deepstack_layers))
    return build_stage(
        model,
        config,
        layer_spec=decoder_layer_spec(
            config, backend=backend, layer_class=DeepstackTransformerLayer
        ),
        rope_axes=interleaved_axes(model.foundation.mrope_section),
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


def _carry_deepstack(config: DecoderConfig, *, features: int) -> None:
    """Let the hidden states grow by the deepstack features that travel with them.

    Where a pipeline boundary falls among the first layers, and only there, the stages have to
    announce their shapes to each other.
    """
    config.deepstack_features = features
    if config.pipeline_model_parallel_size > 1:
        first_chunk = get_num_layers_to_build(
            config,
            vp_stage=0 if config.virtual_pipeline_model_parallel_size else None,
            pp_rank=0,
        )
        if first_chunk < features:
            config.variable_seq_lengths = True


def _encoder_and_projector(
    model: Qwen3VLConfig,
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
        activation_func=partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=False,  # the fused kernel is for the exact GELU
    )
    encoder = Qwen3VisionEncoder(
        vision_config,
        model.image_encoder,
        layer_spec=vision_layer_spec(vision_config, backend=backend),
        pg_collection=groups,
    )
    projector = Qwen3VisionProjector(
        vision_config,
        block_patches=model.image_encoder.spatial_merge_size**2,
        output_size=model.foundation.hidden_size,
        deepstack=len(model.image_encoder.deepstack_layers),
        epsilon=model.image_projector.layernorm_epsilon,
        pg_collection=groups,
    )
    return encoder, projector
