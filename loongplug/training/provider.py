"""The model provider that Megatron's training loop calls, once per stage or virtual chunk.

Beside it, a stage without memory, for who asks for sizes.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.lora_weights import load_adapters, start_adapters
from loongplug.hetero.encoder_place import PlaceOfEncoder
from loongplug.hetero.engine import EncoderEngine, Engine
from loongplug.hetero.modes import modes_of
from loongplug.hetero.recorded_schedule import first_stage
from loongplug.models.decoder import DecoderConfig
from loongplug.models.encoder import payload_widths
from loongplug.models.entries import Entry, encoders
from loongplug.models.family import Family
from loongplug.models.freezing import Freezing
from loongplug.models.layers.specs import Backend
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.module_parts import ModuleState
from loongplug.platform import current_platform
from loongplug.platform.platforms import Platform
from loongplug.schedule.chunk_plan import plan_schedules
from loongplug.schedule.tensor_offload import TensorOffload, offload_layers
from loongplug.training.freezing import apply_freezing
from loongplug.training.own_ranks import arguments_of_decoder
from loongplug.training.streamed_costs import streamed_costs


def backend_of(args: Namespace) -> Backend:
    return "te" if args.transformer_impl == "transformer_engine" else "local"


def engine_of(args: Namespace, model: Any) -> Engine:
    """The engine that the flags and the encoders' YAML ask for."""
    modes = modes_of(args, model)

    def of_encoder(entry: Entry) -> EncoderEngine:
        encoder, mode = model.encoder(entry.name), modes[entry.name]
        place = PlaceOfEncoder(
            mode=mode,
            entry=entry,
            encoder_tp=encoder.tensor_model_parallel_size,
            handed_on=payload_widths(encoder),
            seed=args.seed,
            micro_batch_sizes={
                True: args.micro_batch_size,
                False: args.eval_micro_batch_size or args.micro_batch_size,
            },
            timeout_minutes=args.distributed_timeout_minutes,
            nccl_config_path=args.nccl_communicator_config_path,
        )
        return EncoderEngine(
            found=place,
            taps=len(encoder.taps()),
            joined_rows=encoder.joined_rows,
            decoder=first_stage(args),
            costs=streamed_costs(args, model, entry=entry) if mode.fills_bubbles else None,
        )

    found = {entry.name: of_encoder(entry) for entry in encoders(model.entries())}
    return Engine(found)


def tensor_offload_of(args: Namespace, *, platform: Platform) -> TensorOffload | None:
    least = args.min_offloaded_tensor_size
    names = args.offload_tensors
    return TensorOffload(names=names, platform=platform, least=least) if names else None


def build_on_meta(
    model: Any,
    family: Family,
    args: Namespace,
    *,
    states: Mapping[str, ModuleState | None] | None = None,
    **stage: Any,
) -> MultimodalModel:
    """One ``stage`` of ``model`` without its weights' memory, with the ``states`` of encoders.

    No collectives, but Megatron's parallel state has to be there, with the sizes of ``args``.
    """
    config = core_transformer_config_from_args(args, DecoderConfig)
    config.use_cpu_initialization = True  # upstream names a CUDA device otherwise
    config.perform_initialization = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage = {"pre_process": True, "post_process": True, "vp_stage": None} | stage
    with torch.device("meta"):
        built: MultimodalModel = family.load_builder(model)(
            model, config, pg_collection=groups, states=states, backend="local", **stage
        )
    return built


@dataclass(eq=False)
class ModelProvider:
    """Build the chunks of one rank and remember them, so that they can be exported at the end."""

    model: Any
    family: Family
    _: KW_ONLY
    engine: Engine
    backend: Backend
    freezing: Freezing | None = None
    hf_folder: Path | None = None
    adapter_folder: Path | None = None
    offload: TensorOffload | None = None
    seed: int = 0
    chunks: list[MultimodalModel] = field(default_factory=list, init=False)

    def __call__(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> MultimodalModel:
        """One chunk on the platform's device; the last one freezes, and brings the weights of all.

        Adapters come from the ``adapter_folder``, or start by ``seed``.
        Collective: every rank builds as many chunks as every other. Weights are loaded once all
        are built (tied embeddings make the first and the last chunk of the model wait for each
        other) and before the optimizer copies them into its own shards.
        """
        if config is None:
            args = get_args()
            args = args if self.engine.decodes else arguments_of_decoder(args)
            config = core_transformer_config_from_args(args, DecoderConfig)
        assert isinstance(config, DecoderConfig)
        chunk: MultimodalModel = self.family.load_builder(self.model)(
            self.model,
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
            states=self.engine.states,
            backend=self.backend,
        )
        # Megatron makes routers on the host, as we do norms and embeddings of plain torch, and
        # moves chunks when the provider is done. Weights are broadcast before that, which NCCL
        # does on the device only.
        chunk.to(current_platform().device)
        self.engine.attach(chunk)
        decodes = self.engine.decodes
        if decodes and self.offload is not None:
            offload_layers(chunk, self.offload)
        if decodes and config.overlap_moe_expert_parallel_comm:
            plan_schedules(chunk, offload=self.offload)
        self.chunks.append(chunk)
        chunks = config.virtual_pipeline_model_parallel_size if decodes else None
        if len(self.chunks) == (chunks or 1):
            self._complete()
        return chunk

    def _complete(self) -> None:
        """Once all chunks of the rank are there; collective over all ranks."""
        hugging_face = self.family.load_hugging_face(self.model)
        table = adapter_table(self.model, hugging_face)
        if self.freezing is not None:
            mapping = with_adapters(hugging_face.mapping, table)
            apply_freezing(self.chunks, self.freezing, mapping=mapping)
        if self.hf_folder is not None:
            load_hf_weights(self.chunks, self.hf_folder, model=hugging_face)
        if table is not None and self.adapter_folder is not None:
            load_adapters(self.chunks, self.adapter_folder, table=table)
        elif table is not None:
            start_adapters(self.chunks, table, seed=self.seed)
