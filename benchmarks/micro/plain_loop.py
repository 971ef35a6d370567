"""What one would write without LoongPlug: a transformers model in a torch training loop.

``-m micro.plain_loop FIGURES DATA WEIGHTS MODEL WARMUP STEPS`` trains on one process and
writes the same figures as a measured run of LoongPlug. It is given the same microbatches, with
the position ids made beforehand, and no attention mask (padding on the right needs none), which
is transformers' fastest way.
"""

import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from loongplug.bench.step import StepFigures
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import load_processor
from loongplug.data.source import EncoderUnits, LocalSource
from loongplug.data.step_sizes import StepSizes
from loongplug.training.config import compose_model
from micro.against_transformers import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    MODELS,
)

_ENCODER = "image_encoder"


def train(data: Path, weights: Path, *, model_name: str, warmup: int, steps: int) -> StepFigures:
    """Train ``warmup + steps`` steps and time the latter."""
    compared = MODELS[model_name]
    plain = compose_model(model_name=model_name).config.plain_positions
    processor = load_processor(data / compared.processor)
    assert processor.images is not None
    dataset = ChatDataset(
        data / "train.jsonl",
        processor=processor,
        seq_length=compared.seq_length,
        training_phase="sft",
        plain_positions=plain,
    )
    source = LocalSource(
        dataset,
        sizes=StepSizes.constant(GLOBAL_BATCH_SIZE),
        micro_batch_size=MICRO_BATCH_SIZE,
        dp_rank=0,
        dp_size=1,
        seed=1234,
        encoders={_ENCODER: EncoderUnits(kinds=("image", "video"))},
    )
    loader = MicrobatchLoader(
        source,
        processor=processor,
        seq_length=compared.seq_length,
        token_ids={_ENCODER: processor.visual_token_ids},
    )
    model = AutoModelForImageTextToText.from_pretrained(weights, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    seconds, tokens, losses = [], [], []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        batch = [next(loader) for _ in range(GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE)]
        counted = sum(_whole(microbatch)[1].sum() for microbatch in batch)
        total = 0.0
        for microbatch in batch:
            media = microbatch.units[_ENCODER].media
            assert media is not None
            output = model(
                input_ids=microbatch.input_ids,
                **({} if plain else {"position_ids": microbatch.position_ids}),
                **processor.images.model_inputs(media.rows, media.grids),
                use_cache=False,
            )
            labels, loss_mask = _whole(microbatch)
            token_losses = F.cross_entropy(
                output.logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            loss = (token_losses * loss_mask.flatten()).sum() / counted
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(microbatch.tokens for microbatch in batch))
        losses.append(total)
    return StepFigures(
        ranks=1,
        warmup=warmup,
        step_seconds=tuple(seconds[warmup:]),
        step_tokens=tuple(tokens[warmup:]),
        losses=tuple(losses),
        peak_memory_bytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,),
    )


def _whole(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Labels and loss mask, which are there where nothing was left out."""
    assert microbatch.labels is not None
    assert microbatch.loss_mask is not None
    return microbatch.labels, microbatch.loss_mask


def main() -> None:
    """Train as the command line says and write the figures."""
    path, data, weights, model, warmup, steps = sys.argv[1:]
    figures = train(
        Path(data), Path(weights), model_name=model, warmup=int(warmup), steps=int(steps)
    )
    figures.write(Path(path))


if __name__ == "__main__":
    main()
