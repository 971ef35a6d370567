"""Put one pipeline stage of a vision-language model together."""

from collections.abc import Callable, Mapping

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
from loongplug.models.entries import only_encoder
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
    states: Mapping[str, ModuleState | None] | None = None,
) -> MultimodalModel:
    """One stage (or virtual chunk) of ``model``; ``config`` is the decoder's Megatron config.

    ``build_encoder`` is called where ``pre_process`` is set, or on the first chunk of every rank
    that a state of its own has for it, in that state and with its groups, and what it gives always
    runs in it. ``states`` are those of encoders by the names of entries; an encoder that is not
    among them has the decoder's groups, ``pg_collection``, and one whose state is None lies on
    other ranks. ``layer_spec`` is every decoder
    layer's, ``rope_axes`` as in :class:`~loongplug.models.mrope.MultimodalRotary`.
    """
    foundation = model.foundation
    entries = model.entries()
    states = {
        **{entry.name: ModuleState(groups=pg_collection) for entry in entries},
        **(states or {}),
    }
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
        share_embeddings_and_output_weights=foundation.tie_word_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    encoding: dict[str, MegatronModule] = {}
    entry = only_encoder(entries)
    state = states[entry.name]
    # In a state of its own it lies on the first chunk of each of that state's ranks.
    own = state is not None and state.state is not None and not vp_stage
    if pre_process or own:
        assert state is not None, "the first stage has the encoder"
        assert get_pg_size(pg_collection.tp) == config.tensor_model_parallel_size
        with state.entered():
            encoding = dict(zip(entry.modules, build_encoder(state.groups), strict=True))
        for module in encoding.values():
            # Whoever asks where its slices lie (checkpoints, Hugging Face folders) asks it.
            module.pg_collection = state.groups
            state.run(module)
    architectures = model.modules()
    composed = MultimodalModel(
        decoder,
        entries=entries,
        encoding=encoding,
        pg_collection=pg_collection,
        states=states,
        lr_mults={name: each.lr_mult for name, each in architectures.items()},
    )
    for name, built in composed.named_children():
        architecture = architectures[name]
        if architecture.freeze:
            built.requires_grad_(False)
        if architecture.lora is not None:
            add_adapters(built, architecture.lora)
    return composed


def start_like_the_family(config: DecoderConfig) -> None:
    """Start all weights with one deviation, as the families' own do, before any stage is built.

    Megatron would start the output projections of the layers smaller.
    """
    config.output_layer_init_method = config.init_method
