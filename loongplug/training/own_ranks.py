"""The start of a run with encoders on ranks of their own: groups of all modules, before Megatron's.

Megatron makes groups over all ranks of the world, once. Here they are there when it starts, and it
takes them as they are.
"""

import copy
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from loongplug.hetero.engine import Engine
from loongplug.parallel.layout import Layout
from loongplug.parallel.states import TEXT_DECODER, adopt_own_ranks, decoder_layout, rest_in
from loongplug.platform import current_platform
from loongplug.platform.upstream import store_of_attempt
from loongplug.training.rules.rule import decoder_layout_of
from loongplug.training.step_check import finalized


def make_own_groups(args: Namespace, engine: Engine) -> None:
    """Every module's groups, where a module has ranks of its own; else nothing.

    Collective: the default group, which is made if it is not there.
    """
    if not engine.apart:
        return
    if not dist.is_initialized():
        if current_platform().name == "cuda":
            torch.cuda.set_device(args.local_rank)
        dist.init_process_group(
            backend=args.distributed_backend,
            store=store_of_attempt(),
            world_size=args.ranks,
            rank=args.rank,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )
    decoder = decoder_layout_of(args)
    adopt_own_ranks(
        TEXT_DECODER,
        decoder,
        gloo=args.use_gloo_process_groups,
        initialize=partial(initialize_decoder, args, decoder),
    )
    # A timer's barrier is over the world, and only the decoder's schedule has such timers.
    args.barrier_with_L1_time = False
    args.virtual_stages_of_decoder = args.virtual_pipeline_model_parallel_size
    if TEXT_DECODER in engine.states:  # asked for the first time, it makes those of all encoders
        assert engine.own is not None
        rest_in(engine.own, dp=decoder.dp)
        # Megatron would make as many chunks of an encoder that has stages.
        args.virtual_pipeline_model_parallel_size = None


def arguments_of_decoder(args: Namespace) -> Namespace:
    """``args`` as the decoder's ranks have them, where :func:`make_own_groups` has been."""
    found = copy.copy(args)
    found.virtual_pipeline_model_parallel_size = args.virtual_stages_of_decoder
    return found


def initialize_decoder(args: Namespace, decoder: Layout) -> None:
    """Megatron's groups of the decoder, with the flags that Megatron's own start goes by."""
    names = (
        *("pipeline_model_parallel_comm_backend", "use_sharp", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("distributed_timeout_minutes", "nccl_communicator_config_path"),
        *("high_priority_stream_groups", "sharp_enabled_group"),
    )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        create_gloo_process_groups=args.use_gloo_process_groups,
        rank_offset=decoder.first_rank,
        local_world_size=decoder.world_size,
        **{name: getattr(args, name) for name in names},
    )


def finalized_together(model: Sequence[Any], num_tokens: Tensor, **options: Any) -> None:
    """Megatron's ``finalize_model_grads``, with which encoders elsewhere hear of the tokens.

    The gradients of every module are divided by the tokens of the global batch that count, which
    the decoder's last stage knows; ``num_tokens`` are those of all ranks afterwards. Collective
    over the world, which goes on beside what Megatron does.
    """
    decodes = dist.get_rank() in decoder_layout().ranks
    # On the last stage, all ranks of a tensor parallel group count the same tokens.
    counts = decodes and parallel_state.get_tensor_model_parallel_rank() == 0
    tokens = num_tokens.clone() if counts else torch.zeros_like(num_tokens)
    coming = dist.all_reduce(tokens, async_op=True)
    assert coming is not None, "every rank is in the world"
    finalized(model, num_tokens if decodes else None, **options)
    coming.wait()
    if decodes:
        return
    num_tokens.copy_(tokens)
    for chunk in model:
        chunk.scale_gradients(1.0 / tokens.clamp(min=1))
