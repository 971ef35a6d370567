"""Build one pipeline stage of a Qwen3-VL model from its architecture."""

from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size, init_method_normal
from torch.nn import functional as F

from loongplug.models.decoder import DecoderConfig, TextDecoder
from loongplug.models.deepstack import DeepstackTransformerLayer
from loongplug.models.layers.specs import Backend, decoder_layer_spec, final_norm, vision_layer_spec
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen3_vl.config import Qwen3VisionConfig, Qwen3VLConfig
from loongplug.models.qwen3_vl.projector import Qwen3VisionProjector
from loongplug.models.qwen3_vl.vision import Qwen3VisionEncoder


def vision_transformer_config(
    architecture: Qwen3VisionConfig, *, decoder: TransformerConfig
) -> TransformerConfig:
    """The encoder's Megatron config: its own architecture, the decoder's precision and tp.

    No sequence parallelism: an image's patches need not divide by tp. No pipeline: the encoder is
    whole on the stage that has it.
    """
    init_method = init_method_normal(architecture.initializer_range)
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        add_bias_linear=True,
        add_qkv_bias=True,
        activation_func=partial(F.gelu, approximate="tanh"),
        normalization="LayerNorm",
        layernorm_epsilon=architecture.layernorm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=init_method,
        output_layer_init_method=init_method,
        bias_activation_fusion=False,  # the fused kernel is for the exact GELU
        bias_dropout_fusion=decoder.bias_dropout_fusion,
        # RotarySelfAttention turns queries and keys itself; upstream's rope is never reached.
        apply_rope_fusion=False,
        tensor_model_parallel_size=decoder.tensor_model_parallel_size,
        params_dtype=decoder.params_dtype,
        fp16=decoder.fp16,
        bf16=decoder.bf16,
        use_cpu_initialization=decoder.use_cpu_initialization,
        perform_initialization=decoder.perform_initialization,
        gradient_accumulation_fusion=decoder.gradient_accumulation_fusion,
        attention_backend=decoder.attention_backend,
        deterministic_mode=decoder.deterministic_mode,
        recompute_granularity="full" if architecture.recompute else None,
        recompute_method="uniform" if architecture.recompute else None,
        recompute_num_layers=1 if architecture.recompute else None,
    )


def prepare_decoder_config(config: DecoderConfig, model: Qwen3VLConfig) -> None:
    """Complete the decoder's Megatron config, before any stage is built.

    All weights start with one deviation, as the family's own do; Megatron would start the layers'
    output projections smaller. Hidden states grow by the deepstack features still travelling where
    a pipeline boundary falls among the first layers; only then do the stages have to announce
    their shapes to each other.
    """
    config.output_layer_init_method = config.init_method
    config.deepstack_features = len(model.image_encoder.deepstack_layers)
    if config.pipeline_model_parallel_size > 1:
        first_chunk = get_num_layers_to_build(
            config,
            vp_stage=0 if config.virtual_pipeline_model_parallel_size else None,
            pp_rank=0,
        )
        if first_chunk < config.deepstack_features:
            config.variable_seq_lengths = True


def build_model(
    model: Qwen3VLConfig,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
) -> MultimodalModel:
    """One stage (or virtual chunk) of ``model``; ``config`` is the decoder's Megatron config.

    The encoder and the projector are built where ``pre_process`` is set, sharded over the
    decoder's tensor parallel group.
    """
    prepare_decoder_config(config, model)
    foundation = model.foundation
    num_layers = get_num_layers_to_build(config, vp_stage, get_pg_rank(pg_collection.pp))
    layer_spec = decoder_layer_spec(config, backend=backend, layer_class=DeepstackTransformerLayer)
    decoder = TextDecoder(
        config,
        layer_specs=TransformerBlockSubmodules(
            layer_specs=[layer_spec] * num_layers, layer_norm=final_norm(config, backend=backend)
        ),
        vocab_size=foundation.vocab_size,
        max_sequence_length=foundation.max_position_embeddings,
        rotary_base=foundation.rotary_base,
        visual_token_ids=model.visual_token_ids(),
        share_embeddings_and_output_weights=foundation.tie_word_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    image_encoder = image_projector = None
    if pre_process:
        assert get_pg_size(pg_collection.tp) == config.tensor_model_parallel_size
        vision_config = vision_transformer_config(model.image_encoder, decoder=config)
        image_encoder = Qwen3VisionEncoder(
            vision_config,
            model.image_encoder,
            layer_spec=vision_layer_spec(vision_config, backend=backend),
            pg_collection=pg_collection,
        )
        image_projector = Qwen3VisionProjector(
            vision_config,
            block_patches=model.image_encoder.spatial_merge_size**2,
            output_size=foundation.hidden_size,
            deepstack=len(model.image_encoder.deepstack_layers),
            epsilon=model.image_projector.layernorm_epsilon,
            pg_collection=pg_collection,
        )
    composed = MultimodalModel(
        decoder,
        image_encoder=image_encoder,
        image_projector=image_projector,
        pg_collection=pg_collection,
    )
    composed.freeze(
        image_encoder=model.image_encoder.freeze, image_projector=model.image_projector.freeze
    )
    return composed
