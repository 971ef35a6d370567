"""One rank of a run that is not started: process groups, place, chunks without memory."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

# Its import registers the backend "fake", which sends nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from loongplug.checkpoint.parameter_holders import parameter_names
from loongplug.hetero.engine import Engine
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.megatron_globals import load_start
from loongplug.parallel.states import destroy_parallel_states
from loongplug.training.arguments import ParsedArguments
from loongplug.training.freezing import freezing_of
from loongplug.training.own_ranks import decoder_layout_of, initialize_decoder, make_own_groups
from loongplug.training.provider import build_on_meta, engine_of


@dataclass(frozen=True, kw_only=True)
class EstimatedRank:
    """A rank while Megatron takes this process for it. ``chunks`` are on the meta device."""

    stage: int  # of the pipeline that the rank is of
    engine: Engine
    chunks: tuple[MultimodalModel, ...]


@contextmanager
def as_rank(parsed: ParsedArguments, rank: int) -> Iterator[EstimatedRank]:
    """Inside, Megatron takes this process for ``rank`` of the run; nothing is sent.

    No collectives; there must be no process group yet.
    """
    args = parsed.args
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.ranks)
    try:
        engine = engine_of(args, parsed.model)
        without_gloo = Namespace(**{**vars(args), "use_gloo_process_groups": False})
        if engine.apart:
            make_own_groups(without_gloo, engine)
        else:
            initialize_decoder(without_gloo, decoder_layout_of(args))
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(args.seed)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            yield EstimatedRank(
                stage=stage, engine=engine, chunks=_chunks(parsed, engine, stage=stage)
            )
    finally:
        destroy_parallel_states()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        load_start()  # destroy_model_parallel forgets a group and some lists of ranks


def _chunks(parsed: ParsedArguments, engine: Engine, *, stage: int) -> tuple[MultimodalModel, ...]:
    args, decodes = parsed.args, engine.decodes
    virtual: int | None = args.virtual_pipeline_model_parallel_size if decodes else None
    count = virtual or 1
    chunks = []
    for number in range(count):
        last = stage == args.pipeline_model_parallel_size - 1 and number == count - 1
        chunk = build_on_meta(
            parsed.model,
            parsed.family,
            args,
            pre_process=stage == 0 and number == 0,
            post_process=last or not decodes,
            vp_stage=None if virtual is None else number,
            states=engine.states,
        )
        chunk.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model has it
        # As Megatron's Float16Module does to all there is.
        chunks.append(chunk.bfloat16() if args.bf16 else chunk)
    freezing = freezing_of(args, parsed.model)
    hugging_face = parsed.family.load_hugging_face(parsed.model)
    mapping = with_adapters(hugging_face.mapping, adapter_table(parsed.model, hugging_face))
    for name, parameter in parameter_names(chunks, mapping):
        parameter.requires_grad_(freezing.trains(name))
    return tuple(chunks)
