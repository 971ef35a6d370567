"""What ``bench.py memory`` runs: the model, its data, and the ways to hold less. Pure."""

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loongplug.schedule.tensor_names import NAMES, RECOMPUTED
from loongplug.verify.tiny_processor import write_processor

PLAIN, FULL = "nothing, no overlap", "whole layers recomputed, no overlap"
NOTHING, TWICE, AWAY, BOTH = "nothing", "nodes recomputed", "tensors offloaded", "both"

_OVERLAP: Final = ("--overlap-moe-expert-parallel-comm",)
_TWICE: Final = ("--recompute-granularity", "selective", "--recompute-modules", *RECOMPUTED)
_WHOLE: Final = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_MARKS: Final = 24  # tokens that the chat template takes of a sample, at most


def ways(tensors: Sequence[str] = NAMES) -> dict[str, tuple[str, ...]]:
    """The rows by name, each with its flags.

    ``tensors`` are those that leave where tensors are offloaded.
    """
    away = (
        *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", str(2**12)),
        *("--offload-tensors", *tensors),
    )
    return {
        PLAIN: (),
        FULL: _WHOLE,
        NOTHING: _OVERLAP,
        TWICE: (*_OVERLAP, *_TWICE),
        AWAY: (*_OVERLAP, *away),
        BOTH: (*_OVERLAP, *_TWICE, *away),
    }


@dataclass(frozen=True, kw_only=True)
class Work:
    """A decoder with experts and its steps: the same in every run."""

    layers: int = 12
    seq_length: int = 512
    hidden_size: int = 256
    expert_size: int = 192
    experts: int = 8
    experts_per_token: int = 2
    ranks: int = 2  # the experts are spread over all of them
    microbatches: int = 3  # of a step, on each data parallel replica
    stages: int = 1
    chunks: int = 1  # of a stage
    steps: int = 2  # the last one is measured: from the second on, all go alike

    @property
    def samples(self) -> int:
        """Samples of a step, each a microbatch of its own."""
        return self.microbatches * self.ranks // self.stages

    @property
    def layout(self) -> tuple[str, ...]:
        """Flags of train.py."""
        virtual = (
            ("--num-virtual-stages-per-pipeline-rank", str(self.chunks)) if self.stages > 1 else ()
        )
        return (
            *("--expert-model-parallel-size", str(self.ranks // self.stages)),
            *("--pipeline-model-parallel-size", str(self.stages), *virtual),
        )

    def flags(self, data: Path, *, device: str) -> tuple[str, ...]:
        """Of train.py, all but those of a way to hold less."""
        decoder = {
            "num_layers": self.layers,
            "hidden_size": self.hidden_size,
            "num_experts": self.experts,
            "experts_per_token": self.experts_per_token,
            "expert_ffn_hidden_size": self.expert_size,
            "num_attention_heads": self.hidden_size // 32,
        }
        return (
            *("--model-name", "qwen3_vl_moe_tiny", "--training-phase", "sft", "--device", device),
            *("--tokenizer-model", str(data / "processor")),
            *("--train-data-path", str(data / "train.jsonl")),
            *("--seq-length", str(self.seq_length), "--seed", "1234", "--bf16"),
            *("--micro-batch-size", "1", "--global-batch-size", str(self.samples)),
            *("--lr", "1e-3", "--lr-decay-style", "constant", "--use-distributed-optimizer"),
            *("--lr-decay-iters", "1000000"),  # so short a run is all warm-up by most schedules
            *("--train-iters", str(self.steps), "--log-interval", "1", "--eval-iters", "0"),
            *self.layout,
            *(f"model.foundation.{name}={value}" for name, value in decoder.items()),
        )


def write_data(folder: Path, *, work: Work, seed: int = 1234) -> None:
    """Write ``train.jsonl`` and ``processor/``: texts that fill the sequence, without images."""
    write_processor(folder / "processor")
    rng = random.Random(seed)
    length = work.seq_length - _MARKS
    rows = []
    for _ in range(work.samples * work.steps):
        text = "".join(rng.choices(string.ascii_letters, k=length))
        messages = [
            {"role": "user", "content": text[: length // 2]},
            {"role": "assistant", "content": text[length // 2 :]},
        ]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")
