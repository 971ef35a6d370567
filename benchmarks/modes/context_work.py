"""What ``bench.py context`` runs: rows of text, packs, rows of images, and their flags."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from loongplug.data.sample_order import epoch_permutation
from loongplug.verify.tiny_processor import write_processor
from modes.levels_work import SEQ_LENGTH, write_levels_data

RANKS: Final = 2  # of a row that is split
UNIFORM: Final = "uniform"
LONG, PACKS, IMAGES = "long", "packs", "images"  # folders of data
# Documents of a pack have lognormal lengths: their median as a share of the row, and how far
# their logarithms spread.
MEDIAN, SPREAD = 0.06, 1.2
_TEMPLATE: Final = 32  # tokens of a sample's roles and its question, at most


@dataclass(frozen=True, kw_only=True)
class ContextWork:
    """Sizes of everything that is measured."""

    length: int = 8192  # tokens of a long row
    pack_length: int = 16384
    documents: int = 8  # of a pack
    layers: int = 2  # of the decoder, over such rows
    heads: int = 8  # of attention alone, and their key/value heads and width
    groups: int = 2
    dim: int = 64
    exact_length: int = 768  # of rows whose attention is held against float64
    packs: int = 8  # whose attention is timed
    planned: int = 1 << 20  # tokens of a pack that is planned for 8 ranks
    microbatches: int = 2  # of a step of long rows or packs
    image_decoder_layers: int = 8  # where the encoder has as much work as the decoder
    image_encoder_layers: int = 5
    image_encoder_size: int = 128
    image_microbatches: int = 8
    image_samples: int = 3  # of a microbatch, as in the levels' bench
    warmup: int = 1  # steps that do not count
    steps: int = 2

    @property
    def iterations(self) -> int:
        """Steps of a run."""
        return self.warmup + self.steps


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run of a comparison, which differs from its other runs in these flags alone."""

    name: str
    ranks: int = RANKS
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ContextComparison:
    """Runs of the same samples and weights; ``base`` is what the other is held against."""

    name: str
    data: str  # the folder's name
    base: Side
    side: Side
    wanted: float  # how many times the base's rate


_SPLIT: Final = ("--context-parallel-size", str(RANKS))
_SEED: Final = 1234  # which orders samples, too


def comparisons(work: ContextWork) -> tuple[ContextComparison, ...]:
    """Those of whole steps."""
    # So far that a pack's own documents are all that it can be made of.
    packed = (*_SPLIT, "--packing", "--packing-look-ahead", str(work.documents))
    return (
        ContextComparison(
            name=f"step of {work.length:,} tokens: cp 2 over one rank",
            data=LONG,
            base=Side(name="one rank", ranks=1),
            side=Side(name="cp 2", flags=_SPLIT),
            wanted=1.6,
        ),
        ContextComparison(
            name=f"step of packs of {work.pack_length:,} tokens: lpt over zigzag",
            data=PACKS,
            base=Side(name="zigzag", flags=packed),
            side=Side(name="lpt", flags=(*packed, "--cp-balance", "lpt")),
            wanted=1.2,
        ),
        ContextComparison(
            name="step of images: full separation over uniform, cp 2",
            data=IMAGES,
            base=Side(name=UNIFORM, flags=_SPLIT),
            side=Side(name="full separation", flags=(*_SPLIT, "--enable-full-hetero-dp")),
            wanted=1.3,
        ),
    )


def run_flags(work: ContextWork, *, data: str, folder: Path) -> tuple[str, ...]:
    """Of train.py, all but those of a side; ``folder`` has the data's."""
    images = data == IMAGES
    tokens = {LONG: work.length, PACKS: work.pack_length, IMAGES: SEQ_LENGTH}[data]
    length = -(-tokens // (2 * RANKS)) * 2 * RANKS
    microbatches = work.image_microbatches if images else work.microbatches
    samples = work.image_samples if images else 1  # of a microbatch
    model = (
        (
            f"model.foundation.num_layers={work.image_decoder_layers}",
            f"model.image_encoder.num_layers={work.image_encoder_layers}",
            f"model.image_encoder.hidden_size={work.image_encoder_size}",
            f"model.image_encoder.ffn_hidden_size={2 * work.image_encoder_size}",
        )
        if images
        else (
            f"model.foundation.num_layers={work.layers}",
            f"model.foundation.max_position_embeddings={max(length, 4096)}",
        )
    )
    return (
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(folder / data / "processor")),
        *("--train-data-path", str(folder / data / "train.jsonl")),
        *("--seq-length", str(length), "--seed", str(_SEED)),
        *("--micro-batch-size", str(samples)),
        *("--global-batch-size", str(samples * microbatches)),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--weight-decay", "0.0"),
        *("--lr-decay-iters", "1000000"),  # so short a run is all warm-up by most schedules
        *("--train-iters", str(work.iterations), "--log-interval", "1", "--eval-iters", "0"),
        *model,
    )


def write_data(work: ContextWork, folder: Path) -> None:
    """Rows of text that fill the length, documents for packs, and rows of images."""
    rows = work.iterations * work.microbatches
    _write_texts(folder / LONG, [work.length - _TEMPLATE] * rows)
    # One pack more than a run takes: a planner looks ahead.
    documents = [max(each - _TEMPLATE, 1) for pack in packs_of(work, rows + 1) for each in pack]
    order = epoch_permutation(len(documents), seed=_SEED, epoch=0)  # in which a run takes them
    _write_texts(folder / PACKS, [documents[place] for place in np.argsort(order)])
    samples = work.iterations * work.image_microbatches * work.image_samples
    write_levels_data(folder / IMAGES, samples=samples)


def packs_of(work: ContextWork, number: int) -> list[list[int]]:
    """The lengths of the documents of so many packs, all of equally many documents."""
    drawn = (document_lengths(work.pack_length, seed=seed) for seed in itertools.count())
    return list(itertools.islice((each for each in drawn if len(each) == work.documents), number))


def document_lengths(tokens: int, *, seed: int) -> list[int]:
    """Lengths of documents that fill a row of ``tokens``: lognormal, the last one cut."""
    rng = random.Random(seed)
    least = min(2 * _TEMPLATE, tokens)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(rng.lognormvariate(math.log(MEDIAN * tokens), SPREAD))
        lengths.append(min(max(drawn, least), left))
    return lengths


def _write_texts(folder: Path, lengths: Sequence[int]) -> None:
    """One sample for each length: an answer of so many letters, each a token or part of one."""
    folder.mkdir(parents=True)
    write_processor(folder / "processor")
    rng = random.Random(1234)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Go"},
                {"role": "assistant", "content": "".join(rng.choices("0123456789", k=length))},
            ]
        }
        for length in lengths
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
