"""One rank of LoongPlug against a plain transformers + torch loop: same model, data, precision.

Both sides start from the same weights, see the same microbatches in the same order, train all
parameters in fp32 with AdamW and gradient clipping, on the same number of threads. They take
turns, step by step, with new processes in each round. That their losses agree shows that they do
the same work.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from in_turn import Side, Step, in_turn
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loongplug.bench.step import measure_step, spread
from micro import environment as child_environment

MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE, LEARNING_RATE = 16, 32, 1e-3
WARMUP = 3


@dataclass(frozen=True)
class Compared:
    """A model that both sides train."""

    processor: str  # its folder among the demo data
    seq_length: int  # for the longest of the demo's rows


MODELS = {
    "qwen3_vl_tiny": Compared("processor", 80),
    "llava_tiny": Compared("processor_llava", 128),
}


@dataclass(frozen=True)
class Comparison:
    """Rates of both sides, one figure per round (the median of its steps), and their losses."""

    model: str
    threads: int
    loongplug: tuple[float, ...]  # tokens/s
    transformers: tuple[float, ...]  # tokens/s
    ratio: float  # median of LoongPlug's rate over transformers' rate, step by step
    processor_ratio: float  # LoongPlug's processor time over transformers'
    largest_loss_difference: float


def training_flags(data: Path, model: str) -> list[str]:
    """Flags of LoongPlug's side."""
    compared = MODELS[model]
    return [
        *("--model-name", model, "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(data / compared.processor), "--train-data-path"),
        *(str(data / "train.jsonl"), "--seq-length", str(compared.seq_length)),
        *("--micro-batch-size", str(MICRO_BATCH_SIZE)),
        *("--global-batch-size", str(GLOBAL_BATCH_SIZE)),
        *("--lr", str(LEARNING_RATE), "--lr-decay-style", "constant", "--weight-decay", "0.0"),
        *("--clip-grad", "1.0", "--seed", "1234"),
    ]


def compare(data: Path, *, model: str, rounds: int, steps: int, threads: int) -> Comparison:
    """Run both sides ``rounds`` times in turn on the demo data in ``data``."""
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name) / "weights"
        environment = {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        flags = [*training_flags(data, model), "--load-hf", str(weights)]
        measure_step(
            [*training_flags(data, model), "--lr", "0", "--min-lr", "0", "--save-hf", str(weights)],
            ranks=1,
            warmup=1,
            steps=1,
            environment=environment,
        )
        pairs: list[list[tuple[Step, Step]]] = []
        for number in track(range(rounds), description="rounds"):
            sides = (
                Side(
                    ("-m", "micro.loongplug_loop", WARMUP + steps, *flags),
                    environment=child_environment() | environment,
                ),
                Side(
                    ("-m", "micro.plain_loop", data, weights, model, WARMUP + steps),
                    environment=child_environment() | environment,
                ),
            )
            # Who begins lies first in the machine's memory.
            turned = number % 2 == 1
            first, second = reversed(sides) if turned else sides
            found = in_turn((first, second), warmup=WARMUP, steps=steps)
            pairs.append([(b, a) if turned else (a, b) for a, b in found])
    rates = [
        [median(side.rate for side in sides) for sides in zip(*each, strict=True)] for each in pairs
    ]
    ours, theirs = zip(*rates, strict=True)
    every = list(chain(*pairs))
    return Comparison(
        model=model,
        threads=threads,
        loongplug=ours,
        transformers=theirs,
        ratio=median(a.rate / b.rate for a, b in every),
        processor_ratio=sum(a.processor for a, _ in every) / sum(b.processor for _, b in every),
        largest_loss_difference=max(abs(a.loss - b.loss) for a, b in every),
    )


def report(comparison: Comparison) -> None:
    """Print the comparison as a table."""
    table = Table(
        "side",
        "tokens/s, median (range) of the rounds",
        title=f"one rank, {comparison.threads} thread(s), fp32, {comparison.model}, demo data",
    )
    table.add_row("LoongPlug", spread(comparison.loongplug, form=",.0f"))
    table.add_row("transformers + torch", spread(comparison.transformers, form=",.0f"))
    console = Console()
    console.print(table)
    console.print(
        f"LoongPlug's rate is {comparison.ratio:.2f} times the plain loop's (processor time: "
        f"{comparison.processor_ratio:.2f}); the losses differ by at most "
        f"{comparison.largest_loss_difference:.1e}"
    )


def main(
    data: Annotated[Path, typer.Argument(help="folder made by scripts/make_demo_data.py")],
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "qwen3_vl_tiny",
    rounds: Annotated[int, typer.Option(help="how often both sides take their turn")] = 5,
    steps: Annotated[int, typer.Option(help="measured steps per turn")] = 10,
    threads: Annotated[int, typer.Option(help="threads of each side")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Measure one rank of LoongPlug against a plain transformers + torch loop."""
    if model not in MODELS:
        raise typer.BadParameter(f"{model} is not compared: expected one of {', '.join(MODELS)}")
    comparison = compare(data, model=model, rounds=rounds, steps=steps, threads=threads)
    report(comparison)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(comparison), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
