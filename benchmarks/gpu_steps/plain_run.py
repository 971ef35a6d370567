"""What one would write without this project: a transformers model in a torch training loop.

Its microbatches are made beforehand, and its padding on the right needs no attention mask, which
is transformers' fastest way. For a process of its own.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from gpu_steps.data import Data
from gpu_steps.kernel_trace import KernelTrace, Profiled
from gpu_steps.layer_clock import LayerClock, LayerTimes
from gpu_steps.models import hf_config_of
from gpu_steps.sizes import ModelRun
from gpu_steps.timing import milliseconds, stamp, wait_for

_LEARNING_RATE = 1e-5
_ENCODER = "image_encoder"


@dataclass(frozen=True, kw_only=True)
class PlainFigures:
    """Of the measured steps; ``optimizer_ms`` is empty where nothing was updated."""

    startup_seconds: float
    first_step_seconds: float
    step_tokens: tuple[int, ...]  # before padding
    forward_backward_ms: tuple[float, ...]
    optimizer_ms: tuple[float, ...]
    peak_bytes: int | None  # None on the CPU
    losses: tuple[float, ...]
    layers: LayerTimes | None = None
    profile: KernelTrace | None = None


@dataclass(frozen=True, kw_only=True)
class PlainSettings:
    """``updates``: fp32 weights under autocast and a fused AdamW; else bf16, and none."""

    updates: bool
    warmup: int
    steps: int
    experts_implementation: str | None = None
    times_layers: bool = False
    profiles: bool = False


def plain_run(
    *, run: ModelRun, settings: PlainSettings, data: Data, device: str, began: float, folder: Path
) -> PlainFigures:
    """Train on whole batches of ``run``, each one microbatch, padded to its longest sample's row.

    ``began`` is ``time.time()`` at the start of the process.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    model = _model(run, settings=settings, data=data, device=device)
    layers = model.model.language_model.layers
    clock = LayerClock(list(layers), device=device) if settings.times_layers else None
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
        if settings.updates
        else None
    )
    batches = _batches(run, data=data, count=settings.warmup + settings.steps, device=device)
    startup = time.time() - began
    stamps: list[Sequence[Any]] = []
    losses: list[torch.Tensor] = []
    first_step = 0.0
    for number, batch in enumerate(batches):
        if number == settings.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        stamps.append(_step(model, batch, optimizer=optimizer, device=device, losses=losses))
        if number == 0:
            wait_for(device)
            first_step = time.time() - began - startup
    wait_for(device)
    measured = stamps[settings.warmup :]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    profile = None
    if settings.profiles:
        look = Profiled(folder / "profile-plain.json", device=device)
        _step(model, batches[-1], optimizer=optimizer, device=device, losses=[])
        profile = look.end()
    return PlainFigures(
        startup_seconds=startup,
        first_step_seconds=first_step,
        step_tokens=tuple(batch.tokens for batch in batches[settings.warmup :]),
        forward_backward_ms=tuple(milliseconds(each[0], each[1]) for each in measured),
        optimizer_ms=tuple(milliseconds(*each[1:]) for each in measured if optimizer is not None),
        peak_bytes=peak,
        losses=tuple(loss.item() for loss in losses[settings.warmup :]),
        layers=None if clock is None else clock.times(),
        profile=profile,
    )


def _model(run: ModelRun, *, settings: PlainSettings, data: Data, device: str) -> Any:
    """Random weights, made on the device; the encoder is frozen where the run's is."""
    from transformers import AutoModelForImageTextToText

    from gpu_steps.models import config_of

    kwargs: dict[str, Any] = {"attn_implementation": "sdpa"}
    if settings.experts_implementation is not None:
        kwargs["experts_implementation"] = settings.experts_implementation
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            hf_config_of(run, processor=data.processor),
            dtype=torch.float32 if settings.updates else torch.bfloat16,
            **kwargs,
        ).train()
    if config_of(run).image_encoder.freeze:
        for name, parameter in model.model.visual.named_parameters():
            parameter.requires_grad_("merger" in name)
    return model


def _batches(run: ModelRun, *, data: Data, count: int, device: str) -> list[Any]:
    from micro.plain_loop import loaded_alone

    from loongplug.data.dataset import ChatDataset
    from loongplug.data.loader import MicrobatchLoader
    from loongplug.data.planned_media import EncoderUnits
    from loongplug.data.processor_folder import load_processor
    from loongplug.data.sample_order import StepSizes
    from loongplug.data.source import LocalSource

    processor = load_processor(data.processor)
    dataset = ChatDataset(
        data.rows, processor=processor, seq_length=run.row_length, training_phase="sft"
    )
    source = LocalSource(
        dataset,
        sizes=StepSizes.constant(run.batch),
        micro_batch_size=run.batch,
        parts={0: None},
        dp_size=1,
        seed=1234,
        encoders={_ENCODER: EncoderUnits(kinds=("image", "video"))},
    )
    loader = MicrobatchLoader(
        source,
        processor=processor,
        seq_length=run.row_length,
        token_ids={_ENCODER: processor.places("image", "video")},
        deliveries={_ENCODER: loaded_alone(dataset)},
    )
    return [_on(device, next(loader)) for _ in range(count)]


def _on(device: str, microbatch: Any) -> Any:
    """The same with its tensors there, so that no step waits for them."""

    def there(owner: Any, *names: str) -> Any:
        return replace(owner, **{name: getattr(owner, name).to(device) for name in names})

    from loongplug.data.microbatch import MediaInput

    unit = microbatch.units[_ENCODER]
    there_too = there(microbatch, "input_ids", "position_ids", "labels", "loss_mask")
    taken = unit.media.taken()
    media = MediaInput(loaded=taken.rows.to(device), grids=taken.grids)
    return replace(there_too, units={_ENCODER: replace(unit, media=media)})


def _step(
    model: Any, batch: Any, *, optimizer: Any, device: str, losses: list[torch.Tensor]
) -> Sequence[Any]:
    """One microbatch; stamps before it, behind backward, and behind the update."""
    begin = stamp(device)
    in_fp32 = optimizer is not None
    media = batch.units[_ENCODER].media
    with torch.autocast(device, dtype=torch.bfloat16) if in_fp32 else nullcontext():
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            pixel_values=media.rows,
            image_grid_thw=media.grids.to(device),
            use_cache=False,
        )
        logits = output.logits.float().flatten(0, 1)  # [b * s, vocabulary]
        each = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        loss = (each * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    loss.backward()
    losses.append(loss.detach())
    between = stamp(device)
    if optimizer is not None:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
    end = stamp(device)
    model.zero_grad()
    return begin, between, end
