"""A rank of each side of ``beside_trl.py``: torchrun starts it, and it notes every step.

``beside_ranks.py loongplug FOLDER FLAGS``, or ``beside_ranks.py trl FOLDER SETTINGS`` with the
:class:`TrlSettings` as JSON. Each rank leaves its :class:`RankNotes` in ``FOLDER``.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-4


@dataclass(kw_only=True)
class RankNotes:
    """What a rank saw at the end of each step, and the memory that it had."""

    ended: list[float] = field(default_factory=list)  # by the machine's clock
    processor: list[float] = field(default_factory=list)  # seconds since the process began
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all ranks, before padding
    peak_bytes: int = 0  # the most resident memory, imports included
    held_bytes: int = 0  # at the end of the last step

    def step(self, *, loss: float | None, tokens: int) -> None:
        """Note the end of a step."""
        self.ended.append(time.time())
        self.processor.append(time.process_time())
        self.tokens.append(tokens)
        if loss is not None:
            self.losses.append(loss)
        status = Path("/proc/self/status").read_text()
        self.peak_bytes, self.held_bytes = (
            int(re.findall(rf"{name}:\s*(\d+) kB", status)[0]) * 1024 for name in ("VmHWM", "VmRSS")
        )

    def write(self, folder: Path, *, rank: int) -> None:
        """Leave them for who started the ranks."""
        (folder / f"rank_{rank}.json").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class TrlSettings:
    """What TRL's side trains, and on what; rows come in the order of the file."""

    weights: str
    processor: str
    rows: str
    micro_batch_size: int  # of each rank
    accumulation: int
    steps: int


def loongplug(folder: Path, flags: Sequence[str]) -> None:
    """Train by a bare call of ``run``."""
    from loongplug.train import started

    notes = RankNotes()
    with started(flags):
        import torch

        from loongplug.training.progress import StepReport
        from loongplug.training.run import run

        def after_step(report: StepReport) -> None:
            notes.step(loss=report.loss, tokens=report.tokens)

        run(flags, on_report=after_step, without_save="drop")
        notes.write(folder, rank=torch.distributed.get_rank())


def trl(folder: Path, settings: TrlSettings) -> None:
    """Train by SFTTrainer, which wraps the model in torch's DistributedDataParallel."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(settings.weights, dtype=torch.float32)
    # Else the mean is taken over each microbatch by itself, which is another loss than ours.
    model.accepts_loss_kwargs = True
    notes = RankNotes()

    class Notes(TrainerCallback):
        """Takes note of each step's log, in which tokens are counted from the start."""

        def on_log(self, *args: Any, logs: dict[str, float], **others: Any) -> None:
            if "loss" in logs:  # else, it is the run's summary
                tokens = int(logs["num_tokens"]) - sum(notes.tokens)
                notes.step(loss=logs["loss"], tokens=tokens)

    trainer = SFTTrainer(
        model=model,
        processing_class=AutoProcessor.from_pretrained(settings.processor),
        train_dataset=_dataset(Path(settings.rows)),
        callbacks=[Notes()],
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=settings.accumulation,
            max_steps=settings.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            # The same work as ours: fp32, nothing computed twice, each step's loss known.
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            use_cpu=True,
            train_sampling_strategy="sequential",
            max_length=None,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    notes.write(folder, rank=trainer.args.process_index)


def _dataset(path: Path) -> Any:
    """Rows as TRL wants them: images are read when their row's turn comes."""
    from datasets import Dataset, Image, List

    rows = [trl_row(json.loads(line), folder=path.parent) for line in path.read_text().splitlines()]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def trl_row(row: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """A row of a question with its images in front, and an answer, with names of TRL's."""
    question, answer = row["messages"]
    *images, text = question["content"]
    return {
        "prompt": [{"role": "user", "content": text["text"]}],  # TRL puts images in front
        "completion": [{"role": "assistant", "content": answer["content"]}],
        "images": [str(folder / image["image"]) for image in images],
    }


if __name__ == "__main__":
    side, where, *words = sys.argv[1:]
    if side == "trl":
        trl(Path(where), TrlSettings(**json.loads(words[0])))
    else:
        loongplug(Path(where), words)
