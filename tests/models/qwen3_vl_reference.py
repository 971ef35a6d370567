"""A tiny random Qwen3-VL of transformers, a batch with images, and both sides' step on it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
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
from ranks import model_parallel
from transformers import Qwen3VLConfig as HfConfig
from transformers import Qwen3VLForConditionalGeneration

from loongplug.checkpoint.hf_gather import gather_full_tensors, replica_differences
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.data.microbatch import Microbatch, VisionInput
from loongplug.data.positions import mrope_position_ids
from loongplug.models.decoder import DecoderConfig
from loongplug.models.qwen3_vl.config import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)
from loongplug.models.qwen3_vl.model import build_model
from loongplug.platform import current_platform
from loongplug.training.forward_step import ForwardStep

IMAGE, VIDEO, VISION_START, VISION_END = 5, 6, 3, 4
SEQ_LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a test run is laid out."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
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


def architecture(*, tied: bool) -> Qwen3VLConfig:
    """Small, but with every feature: GQA, deepstack over three layers, an uneven mRoPE."""
    return Qwen3VLConfig(
        image_encoder=Qwen3VisionConfig(
            num_layers=3,
            hidden_size=64,
            ffn_hidden_size=96,
            num_attention_heads=4,
            num_position_embeddings=64,
            deepstack_layers=(0, 1, 2),
        ),
        image_projector=Qwen3ProjectorConfig(),
        foundation=Qwen3DecoderConfig(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=160,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=32,
            vocab_size=128,
            mrope_section=(6, 5, 5),
            tie_word_embeddings=tied,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def reference_model(*, tied: bool, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """The same architecture in transformers, randomly initialised, norms and biases too."""
    ours = architecture(tied=tied)
    vision, text = ours.image_encoder, ours.foundation
    config = HfConfig(
        text_config={
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.ffn_hidden_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_query_groups,
            "head_dim": text.kv_channels,
            "rms_norm_eps": text.layernorm_epsilon,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rotary_base,
                "mrope_section": list(text.mrope_section),
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": tied,
        },
        vision_config={
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.ffn_hidden_size,
            "num_heads": vision.num_attention_heads,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "num_position_embeddings": vision.num_position_embeddings,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
            "out_hidden_size": text.hidden_size,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing left at 0 or 1, where mistakes hide
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.float()


@dataclass(frozen=True)
class Batch:
    """A global batch, sample by sample."""

    samples: tuple[Microbatch, ...]  # one sample each

    def microbatch(self, first: int, size: int) -> Microbatch:
        """Samples ``first`` to ``first + size`` as one microbatch."""
        chosen = self.samples[first : first + size]
        visions = [sample.vision for sample in chosen]
        return Microbatch(
            input_ids=torch.cat([sample.input_ids for sample in chosen]),
            position_ids=torch.cat([sample.position_ids for sample in chosen], dim=1),
            labels=torch.cat([sample.labels for sample in chosen]),
            loss_mask=torch.cat([sample.loss_mask for sample in chosen]),
            tokens=sum(sample.tokens for sample in chosen),
            vision=VisionInput(
                pixels=torch.cat([vision.pixels for vision in visions]),
                grid_thw=torch.cat([vision.grid_thw for vision in visions]),
            ),
        )


def batch(*, seed: int = 1) -> Batch:
    """Eight samples: none to three images of different sizes, different lengths, uneven masks."""
    generator = torch.Generator().manual_seed(seed)
    grids_of_samples = [
        [(1, 2, 2), (1, 4, 4)],
        [],
        [(1, 2, 6)],
        [(1, 4, 2), (1, 2, 2), (1, 2, 4)],
        [],
        [],
        [(1, 6, 4)],
        [(1, 2, 2)],
    ]
    samples = []
    for number, grids in enumerate(grids_of_samples):
        ids: list[int] = []
        for grid in grids:
            ids += torch.randint(10, 128, (1 + number % 3,), generator=generator).tolist()
            ids += [VISION_START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // 4), VISION_END]
        ids += torch.randint(10, 128, (7 + number,), generator=generator).tolist()
        samples.append(_sample(ids, grids, answer=3 + number, generator=generator))
    return Batch(samples=tuple(samples))


def _sample(ids, grids, *, answer: int, generator: torch.Generator) -> Microbatch:
    tokens = torch.tensor(ids)
    length = len(ids)
    padded = torch.full((SEQ_LENGTH,), 1)
    padded[:length] = tokens
    positions = torch.zeros(3, SEQ_LENGTH, dtype=torch.int64)
    positions[:, :length] = torch.from_numpy(
        mrope_position_ids(
            tokens.numpy(), image_token_id=IMAGE, video_token_id=VIDEO, image_grids=grids
        )
    )
    mask = torch.zeros(SEQ_LENGTH)
    mask[length - 1 - answer : length - 1] = 1
    patches = sum(t * h * w for t, h, w in grids)
    return Microbatch(
        input_ids=padded[None],
        position_ids=positions[:, None],
        labels=F.pad(padded[1:], (0, 1), value=1)[None],
        loss_mask=mask[None],
        tokens=length,
        vision=VisionInput(
            pixels=torch.randn(patches, 3 * 2 * 16 * 16, generator=generator),
            grid_thw=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        ),
    )


@dataclass(frozen=True)
class Step:
    """What one step gave: the mean loss, logits per sample and gradients by Hugging Face name."""

    loss: float
    logits: torch.Tensor  # [samples, s, vocab]
    gradients: dict[str, torch.Tensor]


def reference_step(model: Qwen3VLForConditionalGeneration, data: Batch) -> Step:
    """The whole batch at once in transformers; positions come from transformers as well."""
    whole = data.microbatch(0, len(data.samples))
    lengths = torch.tensor([sample.tokens for sample in data.samples])
    attention_mask = (torch.arange(SEQ_LENGTH)[None] < lengths[:, None]).long()
    input_ids = torch.where(attention_mask.bool(), whole.input_ids, 1)
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        pixel_values=whole.vision.pixels,
        image_grid_thw=whole.vision.grid_thw,
        mm_token_type_ids=(input_ids == IMAGE).int(),
    )
    losses = F.cross_entropy(
        output.logits.flatten(0, 1), whole.labels.flatten(), reduction="none"
    ).view_as(whole.loss_mask)
    loss = (losses * whole.loss_mask).sum() / whole.loss_mask.sum()
    loss.backward()
    return Step(
        loss=loss.item(),
        logits=output.logits.detach(),
        gradients={
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )


def decoder_config(model: Qwen3VLConfig, layout: Layout) -> DecoderConfig:
    """The decoder's Megatron config for a layout, fp32."""
    text = model.foundation
    return DecoderConfig(
        num_layers=text.num_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.ffn_hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_query_groups,
        kv_channels=text.kv_channels,
        mrope_section=list(text.mrope_section),
        normalization="RMSNorm",
        layernorm_epsilon=text.layernorm_epsilon,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
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
    )


def build_chunks(model: Qwen3VLConfig, config: DecoderConfig, layout: Layout) -> list:
    """This rank's chunks of the model, not wrapped."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), layout.pp
    chunks = layout.vpp or 1
    return [
        build_model(
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
    rank: int, *, folder: Path, model: Qwen3VLConfig, layout: Layout, data: Batch
) -> Step | None:
    """One step of ``layout`` through Megatron's own schedule; the result is rank 0's."""
    with model_parallel(tp=layout.tp, pp=layout.pp, vpp=layout.vpp):
        config = decoder_config(model, layout)
        bare = build_chunks(model, config, layout)
        load_hf_weights(bare, folder, config=model)
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
            seq_length=SEQ_LENGTH,
            micro_batch_size=size,
        )
        logits = _gather_logits(
            run(
                forward_step_func=_logits_step,
                data_iterator=[iter(microbatches) for _ in chunks],
                forward_only=True,
                collect_non_loss_data=True,
            ),
            layout,
        )
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
        apart = replica_differences(bare, config=model, what="grad")
        assert max(apart.values()) < 1e-6, max(apart, key=apart.__getitem__)
        gradients = gather_full_tensors(bare, config=model, what="grad")
        if gradients is None:
            return None
        return Step(loss=(sums[0] / sums[1]).item(), logits=logits, gradients=gradients)


def _logits_step(iterator, model):
    microbatch = next(iterator)
    logits = model(microbatch.input_ids, microbatch.position_ids, vision=microbatch.vision)
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
    """Largest absolute difference over the tensor's largest absolute reference value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
