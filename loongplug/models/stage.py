"""Put one pipeline stage of a vision-language model together."""

from collections.abc import Callable

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.decoder import DecoderConfig, TextDecoder
from loongplug.models.layers.specs import Backend, final_norm
from loongplug.models.lora.attach import add_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.module_state import ModuleState

EncoderAndProjector = tuple[MegatronModule, MegatronModule]


def build_stage(
    model: VisionLanguageArchitecture,
    config: DecoderConfig,
    *,
    layer_spec: ModuleSpec,
    rope_axes: Tensor,
    build_encoder: Callable[[ProcessGroupCollection], EncoderAndProjector],
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
    encoder_state: ModuleState | None = None,
) -> MultimodalModel:
    """One stage (or virtual chunk) of ``model``; ``config`` is the decoder's Megatron config.

    ``build_encoder`` is called where ``pre_process`` is set, or on the first chunk of every stage
    where ``encoder_state`` says so, in ``encoder_state`` and with its
    groups, and what it gives always runs in that state. ``pg_collection`` is the decoder's, and
    without an ``encoder_state`` the encoder's too. ``layer_spec`` is every decoder layer's,
    ``rope_axes`` as in :class:`~loongplug.models.mrope.MultimodalRotary`.
    """
    foundation = model.foundation
    encoder_state = encoder_state or ModuleState(groups=pg_collection)
    num_layers = get_num_layers_to_build(config, vp_stage, get_pg_rank(pg_collection.pp))
    decoder = TextDecoder(
        config,
        layer_specs=TransformerBlockSubmodules(
            layer_specs=[layer_spec] * num_layers, layer_norm=final_norm(config, backend=backend)
        ),
        vocab_size=foundation.vocab_size,
        max_sequence_length=foundation.max_position_embeddings,
        rotary_base=foundation.rotary_base,
        rope_axes=rope_axes,
        visual_token_ids=model.visual_token_ids(),
        share_embeddings_and_output_weights=foundation.tie_word_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    image_encoder = image_projector = None
    if pre_process or (encoder_state.on_every_stage and not vp_stage):
        assert get_pg_size(pg_collection.tp) == config.tensor_model_parallel_size
        with encoder_state.entered():
            image_encoder, image_projector = build_encoder(encoder_state.groups)
        for module in (image_encoder, image_projector):
            # Whoever asks where its slices lie (checkpoints, Hugging Face folders) asks it.
            module.pg_collection = encoder_state.groups
            encoder_state.run(module)
    composed = MultimodalModel(
        decoder,
        image_encoder=image_encoder,
        image_projector=image_projector,
        pg_collection=pg_collection,
        encoder_state=encoder_state,
        lr_mults={
            "image_encoder": model.image_encoder.lr_mult,
            "image_projector": model.image_projector.lr_mult,
            "text_decoder": model.foundation.lr_mult,
        },
    )
    composed.freeze(
        image_encoder=model.image_encoder.freeze,
        image_projector=model.image_projector.freeze,
        text_decoder=foundation.freeze,
    )
    for built, settings in (
        (image_encoder, model.image_encoder.lora),
        (image_projector, model.image_projector.lora),
        (decoder, model.foundation.lora),
    ):
        if built is not None and settings is not None:
            add_adapters(built, settings)
    return composed


def start_like_the_family(config: DecoderConfig) -> None:
    """Start all weights with one deviation, as the families' own do, before any stage is built.

    Megatron would start the output projections of the layers smaller.
    """
    config.output_layer_init_method = config.init_method
