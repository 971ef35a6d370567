"""One step of a family's model against the same step in transformers, in any layout.

The families' tests bring their tiny architectures; the batches come from ``hf_batches``.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import transformers
from gathered import gather_full_tensors, replica_differences
from hf_batches import IMAGE, SEQ_LENGTH, VIDEO, Batch
from image_units import media_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from ranks import model_parallel, run_ranks

from loongplug.checkpoint.adapter_files import load_adapters, save_adapters
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.decoder import DecoderConfig
from loongplug.models.hf_config import hf_config
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.models.registry import family_of
from loongplug.platform import current_platform
from loongplug.training.forward_step import ForwardStep, packed_segments

LIMIT = 1e-4


@contextmanager
def trusted(package: str) -> Iterator[None]:
    """The package of the folder ``outside`` on the path, and trusted by the comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "outside"))
        trusting = partial(family_of, trusted_packages=[package])
        patch.setattr(sys.modules[__name__], "family_of", trusting)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a test run is laid out."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    ep: int = 1
    etp: int | None = None  # as Megatron: tp
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    sequence_parallel: bool = False
    recompute: bool = False
    micro_batch_size: int = 1
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        if self.vpp:
            parts.append(f"vpp{self.vpp}")
        if self.ep > 1:
            parts.append(f"ep{self.ep}")
        if self.etp:
            parts.append(f"etp{self.etp}")
        if self.dispatcher != "alltoall":
            parts.append(self.dispatcher)
        parts += [
            name
            for name in (
                "sequence_parallel",
                "recompute",
                "distributed_optimizer",
                "overlap_grad_reduce",
            )
            if getattr(self, name)
        ]
        return "-".join(parts)


# What most families are held against transformers in.
LAYOUTS = [
    pytest.param(Layout(), marks=pytest.mark.quick),
    Layout(micro_batch_size=4),
    Layout(tp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, recompute=True, sequence_parallel=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True),
]


def reference_model(model: VisionLanguageArchitecture, *, seed: int = 0) -> Any:
    """The same architecture in transformers, randomly initialised, norms and biases too."""
    hugging_face = family_of(model).load_hugging_face(model)
    torch.manual_seed(seed)
    reference = getattr(transformers, hugging_face.in_transformers.architecture)(
        hf_config(hugging_face)
    )
    with torch.no_grad():
        for parameter in reference.parameters():  # nothing left at 0 or 1, where mistakes hide
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return reference.float()


@dataclass(frozen=True)
class Step:
    """What one step gave: the mean loss, logits per sample and gradients by Hugging Face name."""

    loss: float
    logits: torch.Tensor  # [samples, s, vocab]
    gradients: dict[str, torch.Tensor]


def qwen_arguments(data: Batch, input_ids: torch.Tensor) -> dict[str, Any]:
    """What Qwen's models in transformers take besides text."""
    kinds = (input_ids == IMAGE).int() + 2 * (input_ids == VIDEO).int()
    return {"mm_token_type_ids": kinds, **media_arguments(data)}


def reference_step(
    model: Any,
    data: Batch,
    *,
    regularizer: Callable[[], torch.Tensor] | None = None,
    arguments: Callable[[Batch, torch.Tensor], dict[str, Any]] = qwen_arguments,
) -> Step:
    """The whole batch at once in transformers; positions come from transformers as well.

    What ``regularizer`` gives after the forward is added to the loss that the gradients are of.
    ``arguments`` gives what the model takes besides text, of the batch and its ids.
    """
    whole = data.microbatch(0, len(data.samples))
    lengths = torch.tensor([sample.tokens for sample in data.samples])
    attention_mask = (torch.arange(SEQ_LENGTH)[None] < lengths[:, None]).long()
    input_ids = torch.where(attention_mask.bool(), whole.input_ids, 1)
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        **arguments(data, input_ids),
    )
    losses = F.cross_entropy(
        output.logits.flatten(0, 1), whole.labels.flatten(), reduction="none"
    ).view_as(whole.loss_mask)
    loss = (losses * whole.loss_mask).sum() / whole.loss_mask.sum()
    (loss if regularizer is None else loss + regularizer()).backward()
    return Step(
        loss=loss.item(),
        logits=output.logits.detach(),
        gradients={
            name: _as_saved(name, parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )


def _as_saved(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A copy in the orientation of the files: there, experts are (inputs, outputs) each."""
    experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return (gradient.transpose(1, 2) if experts else gradient).clone()


def by_file_names(step: Step) -> Step:
    """Gradients by the names that transformers gives the tensors in files of before Qwen3-VL."""

    def in_file(name: str) -> str:
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

    return dataclasses.replace(
        step, gradients={in_file(name): tensor for name, tensor in step.gradients.items()}
    )


def media_arguments(data: Batch) -> dict[str, Any]:
    """transformers takes images and videos apart, each in the order of the text."""
    pixels = media_of(data.microbatch(0, len(data.samples))).rows
    media = [medium for sample in data.media for medium in sample]
    pieces = pixels.split([medium.patches for medium in media])
    arguments: dict[str, Any] = {}
    for is_video, kind, suffix in ((False, "image", ""), (True, "video", "_videos")):
        chosen = [number for number, medium in enumerate(media) if medium.is_video == is_video]
        if chosen:
            arguments[f"pixel_values{suffix}"] = torch.cat([pieces[number] for number in chosen])
            arguments[f"{kind}_grid_thw"] = torch.tensor([media[n].grid for n in chosen])
    seconds = [medium.seconds for medium in media if medium.is_video]
    if seconds:
        arguments["second_per_grid_ts"] = torch.tensor(seconds)
    return arguments


def decoder_config(
    model: VisionLanguageArchitecture, layout: Layout, **options: Any
) -> DecoderConfig:
    """The decoder's Megatron config for a layout, fp32."""
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    arguments = family_of(model).megatron_arguments(model)
    architecture = {name: argument.value for name, argument in arguments.items() if name in names}
    return DecoderConfig(
        **architecture,
        num_moe_experts=arguments["num_experts"].value,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        moe_token_dispatcher_type=layout.dispatcher,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=torch.float32,
        # as Megatron's arguments set them: two stages exchange in both directions at once
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        recompute_granularity="full" if layout.recompute else None,
        recompute_method="uniform" if layout.recompute else None,
        recompute_num_layers=1 if layout.recompute else None,
        **options,
    )


def build_chunks(model: VisionLanguageArchitecture, config: DecoderConfig, layout: Layout) -> list:
    """This rank's chunks of the model, not wrapped."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), layout.pp
    chunks = layout.vpp or 1
    return [
        family_of(model).load_builder(model)(
            model,
            config,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == chunks - 1,
            vp_stage=chunk if layout.vpp else None,
            pg_collection=groups,
            backend="local",
        )
        for chunk in range(chunks)
    ]


def our_step(
    rank: int,
    *,
    folder: Path,
    model: VisionLanguageArchitecture,
    layout: Layout,
    data: Batch,
    options: dict[str, Any],
    adapters: Path | None = None,
) -> Step | None:
    """One step of ``layout`` through Megatron's own schedule; the result is rank 0's.

    ``adapters`` is the folder of those that the config asks for; they are written again beside it.
    """
    with model_parallel(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep, etp=layout.etp):
        config = decoder_config(model, layout, **options)
        bare = build_chunks(model, config, layout)
        hugging_face = family_of(model).load_hugging_face(model)
        load_hf_weights(bare, folder, model=hugging_face)
        table = adapter_table(model, hugging_face)
        mapping = with_adapters(hugging_face.mapping, table)
        if table is not None:
            assert adapters is not None
            load_adapters(bare, adapters, table=table)
            save_adapters(bare, adapters / "again", table=table, base=None, model_yaml={})
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_grad_reduce=layout.overlap_grad_reduce,
        )
        chunks = [
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=chunk,
                disable_bucketing=number > 0,
            )
            for number, chunk in enumerate(bare)
        ]
        for chunk in chunks:
            chunk.model_type = ModelType.encoder_or_decoder
        chunk_config = get_model_config(chunks[0])
        chunk_config.finalize_model_grads_func = finalize_model_grads
        if layout.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in chunks]
            chunk_config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        size = layout.micro_batch_size
        per_rank = len(data.samples) // (layout.dp * size)
        dp_rank = parallel_state.get_data_parallel_rank()
        microbatches = [
            data.microbatch((number * layout.dp + dp_rank) * size, size)
            for number in range(per_rank)
        ]
        init_num_microbatches_calculator(rank, None, len(data.samples), size, layout.dp)
        run = partial(
            get_forward_backward_func(),
            model=chunks,
            num_microbatches=per_rank,
            seq_length=data.seq_length,
            micro_batch_size=size,
        )
        with torch.no_grad():  # as in evaluation: it leaves no trace in the routers' statistics
            parts = run(
                forward_step_func=_logits_step,
                data_iterator=[iter(microbatches) for _ in chunks],
                forward_only=True,
                collect_non_loss_data=True,
            )
        logits = _gather_logits(parts, layout)
        reports = run(
            forward_step_func=ForwardStep(current_platform()),
            data_iterator=[iter(microbatches) for _ in chunks],
            forward_only=False,
        )
        destroy_num_microbatches_calculator()
        sums = torch.zeros(2)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            sums = torch.stack([report["lm loss"] for report in reports]).sum(0)
            torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        last = torch.distributed.get_world_size() - 1
        torch.distributed.broadcast(sums, last)
        # Gathering takes the first rank's copy; a missing reduction shows between the copies.
        apart = replica_differences(bare, mapping, what="grad")
        assert max(apart.values()) < 1e-6, max(apart, key=apart.__getitem__)
        gradients = gather_full_tensors(bare, mapping, what="grad")
        if gradients is None:
            return None
        return Step(loss=(sums[0] / sums[1]).item(), logits=logits, gradients=gradients)


def _logits_step(iterator, model):
    microbatch = next(iterator)
    logits = model(
        microbatch.input_ids,
        microbatch.position_ids,
        units=microbatch.units,
        packed_seq_params=packed_segments(microbatch, device=microbatch.position_ids.device),
    )
    return logits, lambda output, non_loss_data: output


def _gather_logits(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor | None:
    """All samples' logits [samples, s, vocab] on rank 0, in the batch's order."""
    mine = None
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        stacked = torch.stack(parts).contiguous()  # [microbatches, b, s, vocab / tp]
        shards = [torch.empty_like(stacked) for _ in range(layout.tp)]
        torch.distributed.all_gather(
            shards, stacked, group=parallel_state.get_tensor_model_parallel_group()
        )
        mine = torch.cat(shards, dim=-1)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            mine = None
    gathered: list = [None] * torch.distributed.get_world_size()
    payload = None if mine is None else (parallel_state.get_data_parallel_rank(), mine)
    torch.distributed.all_gather_object(gathered, payload)
    by_replica = dict(item for item in gathered if item is not None)
    # [microbatches, dp, b, s, vocab]: sample = (microbatch * dp + replica) * b + row
    return torch.stack([by_replica[replica] for replica in range(layout.dp)], dim=1).flatten(0, 2)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference over the tensor's largest absolute reference value.

    Without a unit where the reference is zero all over, as for an expert without tokens.
    """
    scale = theirs.abs().max()
    return ((ours - theirs).abs().max() / (scale if scale > 0 else 1.0)).item()


def expert_by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``gradients`` with each expert by itself: among all, a large one would hide a small one."""
    split: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if ".mlp.experts." in name and gradient.dim() == 3:  # all in one tensor
            split |= {f"{name}[{number}]": each for number, each in enumerate(gradient)}
        else:
            split[name] = gradient
    return split


def assert_agreement(
    model: VisionLanguageArchitecture,
    folder: Path,
    *,
    layout: Layout,
    data: Batch,
    expected: Step,
    limit: float = LIMIT,
    adapters: Path | None = None,
    measured: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = expert_by_expert,
    **options: Any,
) -> None:
    """Loss, logits and every gradient of ``layout`` are the expected ones, within ``limit``.

    Encoders are recomputed where the decoder is.
    ``measured`` makes what is compared of the gradients, one error each.
    ``options`` are settings of the decoder's Megatron config, ``adapters`` is as in
    :func:`our_step`.
    """
    encoders = {
        model.keys[name]: dataclasses.replace(model.encoder(name), recompute=layout.recompute)
        for name in model.encoders
    }
    step = run_ranks(
        our_step,
        layout.world_size,
        folder=folder,
        model=dataclasses.replace(model, **encoders),
        layout=layout,
        data=data,
        options=options,
        adapters=adapters,
    )[0]
    assert abs(step.loss - expected.loss) < limit * expected.loss
    lengths = [sample.tokens for sample in data.samples]
    for sample, length in enumerate(lengths):  # behind a sample's end, the two pad differently
        error = relative_error(step.logits[sample, :length], expected.logits[sample, :length])
        assert error < limit, (sample, error)
    found, wanted = measured(step.gradients), measured(expected.gradients)
    assert set(wanted) <= set(found)
    # What transformers did not come to has no gradient there, and a zero one here.
    assert not any(bool(found[name].any()) for name in set(found) - set(wanted))
    errors = {name: relative_error(found[name], gradient) for name, gradient in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < limit, (worst, errors[worst])
