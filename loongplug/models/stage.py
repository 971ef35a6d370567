"""Build one pipeline stage of a model from its architecture and its parts."""

from collections.abc import Mapping
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from loongplug.models.architecture import EncoderArchitecture, MultimodalArchitecture
from loongplug.models.decoder import DecoderConfig
from loongplug.models.encoder import EncoderStage
from loongplug.models.entries import Entry, encoders, only_decoder
from loongplug.models.layers.specs import Backend
from loongplug.models.lora.adapter import add_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.parts import Part, load
from loongplug.parallel.module_parts import ModuleState


def build_model(
    parts: Mapping[str, Part],
    model: MultimodalArchitecture,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
    states: Mapping[str, ModuleState | None] | None = None,
) -> MultimodalModel:
    """One stage (or virtual chunk) of ``model``; ``config`` is the decoder's Megatron config.

    ``parts`` are those of the modules, by name. An encoder and its projector are built where
    ``pre_process`` is set, or on the first chunk of every rank that a state of its own has for the
    encoder, in that state and with its groups, and always run in it. Where the encoder has stages,
    each has its own part, and the last the projector. ``states`` are those of
    encoders by the names of entries; an encoder that is not among them has the decoder's groups,
    ``pg_collection``, and one whose state is None lies on other ranks. So does the decoder, where
    its state is None; the groups are an encoder's then.
    """
    # All weights start with one deviation; Megatron would start the output projections smaller.
    config.output_layer_init_method = config.init_method
    _carry_deepstack(config, features=model.taps())
    entries = model.entries()
    states = {
        **{entry.name: ModuleState(groups=pg_collection) for entry in entries},
        **(states or {}),
    }
    architectures = model.modules()
    decoder = only_decoder(entries).name
    built_decoder = None
    if states[decoder] is not None:
        built_decoder = load(parts[decoder].build)(
            architectures[decoder],
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            backend=backend,
        )
    encoding: dict[str, MegatronModule] = {}
    for entry in encoders(entries):
        state = states[entry.name]
        # In a state of its own it lies on the first chunk of each of that state's ranks.
        own = state is not None and state.state is not None and not vp_stage
        if state is not None and (pre_process or own):
            encoding |= _encoding(parts, model, config, entry, state, backend=backend)
    composed = MultimodalModel(
        built_decoder,
        config=config,
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


def _encoding(
    parts: Mapping[str, Part],
    model: MultimodalArchitecture,
    config: DecoderConfig,
    entry: Entry,
    state: ModuleState,
    *,
    backend: Backend,
) -> dict[str, MegatronModule]:
    """An entry's encoder and, where that is its last stage, its projector, by name."""
    architectures = model.modules()
    name, projector = entry.modules
    with state.entered():
        encoder = load(parts[name].build)(
            architectures[name], decoder=config, groups=state.groups, backend=backend
        )
        built = {name: encoder}
        if _is_last_stage(encoder, model.encoder(name), key=model.keys[name]):
            built[projector] = load(parts[projector].build)(
                architectures[projector],
                vision=architectures[name],
                config=encoder.config,
                output_size=model.foundation.hidden_size,
                groups=state.groups,
            )
    for module in built.values():
        # Checkpoints and Hugging Face folders ask it where its slices are.
        module.pg_collection = state.groups
        state.run(module)
    return built


def _carry_deepstack(config: DecoderConfig, *, features: int) -> None:
    """Let the hidden states grow by the deepstack features that travel with them.

    Where a pipeline boundary falls among the first layers, and only there, the stages have to
    announce their shapes to each other.
    """
    config.deepstack_features = features
    if config.pipeline_model_parallel_size > 1:
        layout = config.pipeline_model_parallel_layout
        if layout is not None:  # the function below would give this rank's own number
            first_chunk = layout.get_num_layers_to_build(vp_stage=0, pp_rank=0)
        else:
            first_chunk = get_num_layers_to_build(
                config,
                vp_stage=0 if config.virtual_pipeline_model_parallel_size else None,
                pp_rank=0,
            )
        if first_chunk < features:
            config.variable_seq_lengths = True


def _is_last_stage(encoder: Any, architecture: EncoderArchitecture, *, key: str) -> bool:
    """Whether the projector lies here. Raises ValueError for stages of one that knows of none."""
    stages = len(architecture.layers_of_stages)
    stage: EncoderStage | None = getattr(encoder, "stage", None)
    if stage is None and stages > 1:
        raise ValueError(
            f"model.{key}.pipeline_model_parallel_size is {stages}, but a "
            f"{type(encoder).__name__} is computed in one piece: leave it away."
        )
    return stage is None or stage.last
