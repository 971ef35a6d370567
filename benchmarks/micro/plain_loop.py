"""What one would write without LoongPlug: a transformers model in a torch training loop.

``-m micro.plain_loop DATA WEIGHTS MODEL STEPS DONE`` trains on one process, a step at a time
(:mod:`in_turn`). It is given the same microbatches as LoongPlug, with the position ids made
beforehand, and no attention mask (padding on the right needs none), which is transformers' fastest
way.
"""

import sys
from pathlib import Path

import torch
from in_turn import tell
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader, RowLengths
from loongplug.data.media_loader import coded_media
from loongplug.data.microbatch import Microbatch
from loongplug.data.planned_media import EncoderUnits
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.training.config import compose_model
from loongplug.training.delivery import ReplicaDelivery
from micro.against_transformers import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    MODELS,
)

_ENCODER = "image_encoder"


def train(data: Path, weights: Path, *, model_name: str, steps: int, done: int) -> None:
    """Train ``steps`` steps, and tell each to ``done``."""
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
        parts={0: None},
        dp_size=1,
        seed=1234,
        encoders={_ENCODER: EncoderUnits(kinds=("image", "video"))},
    )
    loader = MicrobatchLoader(
        source,
        processor=processor,
        seq_length=compared.seq_length,
        row_lengths=RowLengths(),
        token_ids={_ENCODER: processor.places("image", "video")},
        deliveries={_ENCODER: loaded_alone(dataset)},
    )
    model = AutoModelForImageTextToText.from_pretrained(weights, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    for _ in range(steps):
        batch = [next(loader) for _ in range(GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE)]
        counted = sum(_whole(microbatch)[1].sum() for microbatch in batch)
        total = 0.0
        for microbatch in batch:
            media = microbatch.units[_ENCODER].media
            assert media is not None
            taken = media.taken()
            output = model(
                input_ids=microbatch.input_ids,
                **({} if plain else {"position_ids": microbatch.position_ids}),
                **processor.images.model_inputs(taken.rows, taken.grids),
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
        tell(total, sum(microbatch.tokens for microbatch in batch), done=done)


def loaded_alone(dataset: ChatDataset) -> ReplicaDelivery:
    """Media that one process loads and encodes, on the host."""
    return ReplicaDelivery(
        [(0,)],
        None,
        rank=0,
        row_values=dataset.processor.vision.patch_dim,
        coded=coded_media(dataset.processor, dataset.videos),
        device=torch.device("cpu"),
        news=None,
    )


def _whole(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Labels and loss mask, which are there where nothing was left out."""
    assert microbatch.labels is not None
    assert microbatch.loss_mask is not None
    return microbatch.labels, microbatch.loss_mask


def main() -> None:
    """Train as the command line says."""
    data, weights, model, steps, done = sys.argv[1:]
    train(Path(data), Path(weights), model_name=model, steps=int(steps), done=int(done))


if __name__ == "__main__":
    main()
