"""Forward and backward of every mode ask the device for nothing: the host is never in its way.

Whole steps of single ranks on tensors without values, with nobody to talk to.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_batches import Batch, Style, batch, packed, qwen3_positions
from host_waits import META, meta_device, no_waits
from image_units import ENCODER, media_of, unit_of
from megatron.core.pipeline_parallel.utils import set_streams
from ranks import run_ranks

from loongplug.data.microbatch import Microbatch, Share
from loongplug.estimate.ranks import EstimatedRank, as_rank
from loongplug.estimate.run_of_flags import parsed_for
from loongplug.estimate.tracing import answers, spread_tokens_evenly
from loongplug.models.features import features_behind
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform import current_platform
from loongplug.platform.devices import to_device
from loongplug.schedule.chunk_plan import ChunkPlan, plan_schedules
from loongplug.schedule.tensor_offload import offload_layers
from loongplug.training.forward_step import ForwardStep
from loongplug.training.provider import tensor_offload_of

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"
DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
SEPARATED = ("--full-hetero-dp-schedule", "separated")
EXPERTS = ("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2")
WINDOWS = ("--model-name", "qwen2_5_vl_tiny")
PACKED = ("--packing", "--micro-batch-size", "1")
RECOMPUTE = (
    *("model.image_encoder.recompute=true", "--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
FEATURES_AWAY = ("--full-hetero-dp-cpu-offload", "--offload-encoder-activations")
LAYERS_AWAY = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "64"),
    *("--offload-tensors", "layer_input", "fc2_input"),
)
# Ranks, the one that is looked at, and flags.
CASES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "one-rank-packed-recompute": (1, 0, (*PACKED, *RECOMPUTE)),
    "windows-packed-layers-away": (1, 0, (*WINDOWS, *PACKED, *LAYERS_AWAY)),
    "tp2-sp-first-stage": (4, 1, (TP, "2", PP, "2", SP)),
    "tp2-sp-last-stage": (4, 3, (TP, "2", PP, "2", SP)),
    "hetero-tp": (2, 1, (TP, "2", SP, "+model.image_encoder.tensor_model_parallel_size=1")),
    "hetero-dp-windows-packed": (2, 0, (DP, TP, "2", *WINDOWS, *PACKED)),
    "full-first-stage-away": (2, 0, (FULL, PP, "2", *FEATURES_AWAY)),
    "full-last-stage-sp-packed": (4, 2, (FULL, *SEPARATED, TP, "2", PP, "2", SP, *PACKED)),
    "experts-balanced": (2, 1, (*EXPERTS, "--moe-aux-loss-coeff", "0.01", *RECOMPUTE)),
    "experts-tp2-sp-packed-full": (
        *(2, 0),
        (*EXPERTS, "--expert-tensor-parallel-size", "1", FULL, TP, "2", SP, *PACKED),
    ),
    "experts-overlap": (2, 0, (*EXPERTS, "--bf16", "--overlap-moe-expert-parallel-comm")),
}


def data_of(args: Any, model: Any) -> Batch:
    """Images, videos and text alone, in samples of different lengths."""
    style = Style(
        patch_values=model.image_encoder.row_values, frames_apart=True, positions=qwen3_positions
    )
    data = batch(style)
    if args.packing:
        return packed(data, [(0, 1), (2, 4, 3)], seq_length=160)
    return data


def microbatches_of(here: EstimatedRank, args: Any, model: Any) -> list[Microbatch]:
    """As a rank's loader gives them: the pixels of the units that it encodes are on the device."""
    data, size = data_of(args, model), args.micro_batch_size
    replicas = len(here.engine.encoders[ENCODER].place.edge.replicas)
    made = []
    for number in range(2):
        found = data.microbatch(number * size, size)
        media = media_of(found)
        unit = replace(
            unit_of(found),
            media=replace(media, loaded=to_device(media.loaded, META)),
            shares=(Share(encoder_replica=number % replicas),),
        )
        made.append(replace(found, units={ENCODER: unit}, number=number))
    return made


def received(chunk: MultimodalModel, microbatch: Microbatch) -> torch.Tensor | None:
    """What the stage before sends."""
    decoder = chunk.text_decoder
    if decoder.pre_process:
        return None
    first = decoder.decoder.layers[0].layer_number - 1
    streams = 1 + features_behind(layer=first, deepstack=decoder.config.deepstack_features)
    _, rows, length = microbatch.position_ids.shape
    if decoder.config.sequence_parallel:
        length //= decoder.config.tensor_model_parallel_size
    shape = (streams * length, rows, decoder.config.hidden_size)
    return torch.empty(shape, dtype=decoder.config.params_dtype, device=META).requires_grad_()


Step = Callable[..., Any]


def one_by_one(step: Step, chunk: MultimodalModel, microbatches: list[Microbatch]) -> None:
    """Forward and backward of each in turn."""
    for each in microbatches:
        chunk.set_input_tensor(received(chunk, each))
        output, loss = step(iter([each]), chunk)
        if chunk.post_process:
            loss(output)[0].backward()
        else:
            output.backward(torch.empty_like(output))


def in_pairs(step: Step, chunk: MultimodalModel, microbatches: list[Microbatch]) -> None:
    """Each backward beside the next forward."""
    set_streams()
    plan_schedules(chunk)
    before = gradient = None
    for each in microbatches:
        plan, _ = step(iter([each]), chunk, return_schedule_plan=True)
        ChunkPlan.run(plan, before, b_grad=gradient)
        before, gradient = plan, to_device(each.loss_mask, META)
    ChunkPlan.run(None, before, b_grad=gradient)


def whole_step(rank: int, *, flags: list[str], ranks: int, me: int) -> None:
    dist.destroy_process_group()  # the harness's: a rank that is not there makes one of its own
    parsed = parsed_for(flags, ranks=ranks)
    args = parsed.args
    # What MoE has to know: how many tokens go to whom, and which probabilities they have.
    known = answers(experts_per_token=args.moe_router_topk, experts=args.num_experts or 1)
    with as_rank(parsed, me) as here, meta_device(), no_waits(known):
        (chunk,) = here.chunks
        chunk.train()
        spread_tokens_evenly(chunk)
        offload = tensor_offload_of(args, platform=current_platform())
        if offload is not None:
            offload_layers(chunk, offload)
        executor = here.engine.encoders[ENCODER].executor() if here.engine.steps else None
        here.engine.attach(chunk)
        chunk.outside_schedule = set()
        chunk.parts = {ENCODER: SimpleNamespace(no_sync=nullcontext)}
        microbatches = microbatches_of(here, args, parsed.model)
        step: Step = ForwardStep(current_platform())
        if executor is not None:
            executor.begin(chunk, microbatches, training=True)
            step = executor.watched(step)
        passes = in_pairs if args.overlap_moe_expert_parallel_comm else one_by_one
        passes(step, chunk, microbatches)
        if executor is not None:
            executor.end()
        trained = {name: each.grad is not None for name, each in chunk.named_parameters()}
    assert all(trained.values()), [name for name, found in trained.items() if not found]


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_for_nothing(flags, case):
    ranks, me, more = CASES[case]
    run_ranks(whole_step, 1, flags=[*flags, *more], ranks=ranks, me=me)


@pytest.mark.quick
def test_what_does_not_wait_is_let_through():
    with no_waits():
        x = to_device(torch.zeros(3), META)
        x[x > 0] = 0  # by a number: a fill, on a GPU too
        x += torch.zeros(())
        assert x[to_device(torch.tensor([0, 2]), META)].shape == (2,)
        assert torch.zeros(3).nonzero().shape == (0, 1)  # the host's own
