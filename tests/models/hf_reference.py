"""One step of a family's model against the same step in transformers, in any layout.

The families' tests bring their tiny architectures; the batches come from ``hf_batches``.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hf_models
import torch
import torch.nn.functional as F
from gathered import gather_full_tensors, replica_differences
from hf_batches import IMAGE, SEQ_LENGTH, VIDEO, Batch
from hf_models import Layout, build_chunks, decoder_config, reference_model
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
from megatron.core.utils import get_model_config
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.lora_weights import load_adapters, save_adapters
from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.hf_mapping import is_carried
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.platform import current_platform
from loongplug.training.forward_step import ForwardStep, packed_segments

LIMIT = 1e-4


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
            name: _turned(name, parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )


def _turned(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A copy in the orientation of published files: there, experts are (inputs, outputs) each."""
    experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return (gradient.transpose(1, 2) if experts else gradient).clone()


@dataclass(frozen=True)
class Reference:
    """A model, a batch and its step in transformers; ``folder`` has the weights."""

    model: VisionLanguageArchitecture
    folder: Path
    data: Batch
    step: Step


def reference(
    folder: Path,
    model: VisionLanguageArchitecture,
    data: Batch,
    arguments: Callable[[Batch, torch.Tensor], dict[str, Any]] = qwen_arguments,
) -> Reference:
    """Made in transformers; its step has gradients by the names in its files."""
    theirs = reference_model(model)
    theirs.save_pretrained(folder)
    step = reference_step(theirs, data, arguments=arguments)
    gradients = as_saved(theirs, folder / "gradients")
    # The last layer's and the pooling's are not part of the loss, and have no gradient.
    rows = hf_models.family_of(model).load_hugging_face(model).mapping.rows
    carried = {row.sources[0].name for row in rows if is_carried(row.names[0])}
    left = load_file(folder / "model.safetensors").keys() - gradients.keys()
    assert left == carried or not any(data.media), left ^ carried
    return Reference(model, folder, data, dataclasses.replace(step, gradients=gradients))


def as_saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients by the names, and in the shapes, that transformers gives tensors in its files.

    It saves them as if they were weights; what has none is NaN there, and left out.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            grad = torch.tensor(torch.nan) if parameter.grad is None else parameter.grad
            parameter.copy_(grad)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    return {name: _turned(name, each) for name, each in saved.items() if not each.isnan().all()}


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
        hugging_face = hf_models.family_of(model).load_hugging_face(model)
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


# A tower's, of keys that nothing turns: alone, it changes no output, so that its gradient is noise.
KEY_BIAS = re.compile(r"^(vision_tower\..*\.)(k_proj|key)(\.bias)$")
BESIDE_KEYS = {"k_proj": ("q_proj", "k_proj", "v_proj"), "key": ("query", "key", "value")}


def measured(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is compared: each expert by itself, for among all, a large one would hide a small one;
    and a tower's q, k and v biases in one where nothing turns keys.
    """
    split: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if ".mlp.experts." in name and gradient.dim() == 3:  # all in one tensor
            split |= {f"{name}[{number}]": each for number, each in enumerate(gradient)}
        else:
            split[name] = gradient
    for name in [name for name in split if KEY_BIAS.search(name)]:
        kinds = BESIDE_KEYS[name.split(".")[-2]]
        apart = [KEY_BIAS.sub(rf"\g<1>{kind}\g<3>", name) for kind in kinds]
        split[f"{name} and others"] = torch.stack([split.pop(each) for each in apart])
    return split


def assert_agrees(
    reference: Reference,
    layout: Layout,
    *,
    limit: float = LIMIT,
    adapters: Path | None = None,
    **options: Any,
) -> None:
    """Loss, logits and every gradient of ``layout`` are the reference's, within ``limit``.

    Encoders are recomputed where the decoder is.
    ``options`` are settings of the decoder's Megatron config, ``adapters`` is as in
    :func:`our_step`.
    """
    model, data, expected = reference.model, reference.data, reference.step
    encoders = {
        model.keys[name]: dataclasses.replace(model.encoder(name), recompute=layout.recompute)
        for name in model.encoders
    }
    step = run_ranks(
        our_step,
        layout.world_size,
        folder=reference.folder,
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
