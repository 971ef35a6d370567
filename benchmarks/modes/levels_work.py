"""What ``bench.py levels`` runs: samples, settings, levels and their flags.

Samples have images enough that encoding them is a large share of the work. They look like the
demo's: several images of various sizes, a short question, a short answer. What is on the images
does not matter to the clock.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from loongplug.verify.tiny_processor import write_processor

UNIFORM, TUNED = "uniform", "uniform tuned"
HETERO_TP, HETERO_DP, FULL = "heterogeneous TP", "heterogeneous DP", "full separation"
STREAMED, APART = "streamed full separation", "ranks of its own"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A layout of the decoder that all levels share."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Processes, one thread each."""
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> tuple[str, ...]:
        """Of train.py."""
        return (
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
        )

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that differ from uniform here, and uniform, which comes first.

        Without stages there is no split of layers to tune and no bubble to fill, and without
        tensor parallelism an encoder of tensor parallel size 1 is what uniform has. Over two stages
        alone, the encoder can have the second one's rank for itself.
        """
        apart = (APART,) if (self.tp, self.pp, self.dp) == (1, 2, 1) else ()
        tuned = (TUNED,) if self.pp > 1 else ()
        within_tp = (HETERO_TP, HETERO_DP) if self.tp > 1 else ()
        streamed = (STREAMED,) if self.pp > 1 else ()
        return (UNIFORM, *tuned, *within_tp, FULL, *streamed, *apart)


SETTINGS: Final = (
    Setting(name="PP2", pp=2),
    Setting(name="TP2", tp=2),
    Setting(name="DP2", dp=2),
    Setting(name="TP2 x PP2", tp=2, pp=2),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The model and its steps: the same in every run."""

    decoder_layers: int = 8
    encoder_layers: int = 5
    encoder_size: int = 128
    micro_batch_size: int = 3
    microbatches: int = 8  # of a step, over all data parallel replicas
    warmup: int = 2  # steps that do not count
    steps: int = 5

    @property
    def iterations(self) -> int:
        """Steps of a run."""
        return self.warmup + self.steps

    @property
    def samples(self) -> int:
        """Samples of a run."""
        return self.iterations * self.micro_batch_size * self.microbatches

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the tiny Qwen3-VL."""
        return (
            f"model.foundation.num_layers={self.decoder_layers}",
            f"model.image_encoder.num_layers={self.encoder_layers}",
            f"model.image_encoder.hidden_size={self.encoder_size}",
            f"model.image_encoder.ffn_hidden_size={2 * self.encoder_size}",
        )

    def flags(self, data: Path) -> tuple[str, ...]:
        """Of train.py, all but those of the layout and the level."""
        return (
            *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
            *("--tokenizer-model", str(data / "processor")),
            *("--train-data-path", str(data / "train.jsonl")),
            *("--seq-length", str(SEQ_LENGTH), "--seed", "1234"),
            *("--micro-batch-size", str(self.micro_batch_size)),
            *("--global-batch-size", str(self.micro_batch_size * self.microbatches)),
            *("--lr", "1e-3", "--lr-decay-style", "constant", "--weight-decay", "0.0"),
            *("--lr-decay-iters", "1000000"),  # so short a run is all warm-up by most schedules
            *("--train-iters", str(self.iterations), "--log-interval", "1", "--eval-iters", "0"),
            *self.overrides,
        )


def split_candidates(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of the first stage that are worth a trial: fewer than an even share.

    The first stage has the encoder besides, and the rest has to divide over the later stages.
    """
    if stages < 2:
        return ()
    return tuple(
        first for first in range(1, -(-layers // stages)) if (layers - first) % (stages - 1) == 0
    )


def split_flags(first: int) -> tuple[str, ...]:
    """An uneven split of the decoder's layers, with ``first`` of them on the first stage."""
    return ("--decoder-first-pipeline-num-layers", str(first))


def level_variants(level: str, work: Work, setting: Setting) -> tuple[tuple[str, ...], ...]:
    """The flags that make a run one of ``level``; of several, the fastest stands for it."""
    if level == TUNED:
        splits = split_candidates(work.decoder_layers, setting.pp)
        return tuple(split_flags(first) for first in splits)
    flags: dict[str, tuple[str, ...]] = {
        UNIFORM: (),
        HETERO_TP: ("model.image_encoder.tensor_model_parallel_size=1",),
        HETERO_DP: ("--enable-encoder-hetero-dp",),
        FULL: ("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "separated"),
        STREAMED: ("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "streamed"),
        APART: ("--pipeline-model-parallel-size", "1", "model.image_encoder.rank_offset=1"),
    }
    return (flags[level],)


# Height, width. Multiples of 32, as the tiny processor takes them: one token per 32 x 32.
SIZES: Final = ((96, 96), (96, 128), (128, 96), (128, 128))
IMAGES_PER_SAMPLE: Final = (5, 6)

# The most that a sample takes: its images' tokens with two marks each, and its words.
_WORDS: Final = 24
SEQ_LENGTH: Final = max(IMAGES_PER_SAMPLE) * (max(h * w for h, w in SIZES) // 32**2 + 2) + _WORDS


def write_levels_data(folder: Path, *, samples: int, seed: int = 1234) -> None:
    """Write ``train.jsonl``, ``images/`` and ``processor/``; the same arguments, the same files."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_processor(folder / "processor")
    generator = np.random.default_rng(seed)
    for height, width in SIZES:
        noise = generator.integers(0, 256, size=(height, width), dtype=np.uint8)
        Image.fromarray(noise, mode="L").save(folder / _image(height, width))
    rng = random.Random(seed)
    rows = [json.dumps(_row(rng)) + "\n" for _ in range(samples)]
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def _row(rng: random.Random) -> dict[str, object]:
    sizes = [rng.choice(SIZES) for _ in range(rng.choice(IMAGES_PER_SAMPLE))]
    images = [{"type": "image", "image": _image(*size)} for size in sizes]
    question = {"type": "text", "text": "count?"}
    return {
        "messages": [
            {"role": "user", "content": [*images, question]},
            {"role": "assistant", "content": str(len(images))},
        ]
    }


def _image(height: int, width: int) -> str:
    return f"images/{height}x{width}.png"
