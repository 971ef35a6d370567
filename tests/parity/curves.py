"""Loss curves of one model in several places: how far apart they ever are.

As in figure C.1 and table A6 of *Heterogeneous Parallelism for Multimodal Large Language Model
Training* (Karnati et al.): LLaVA with a frozen encoder, with its decoder frozen and trained, 100
steps in fp32 from the same weights on the same samples.

    PYTHONPATH=tests python -m parity.curves DATA [--steps N] [--json FILE]

``DATA`` is a folder made by ``scripts/make_demo_data.py``.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranks import run_ranks
from rich.console import Console
from rich.table import Table

from parity.placement_cells import placed
from parity.saving_cells import TRAINED

STEPS, BATCH, SEQ_LENGTH = 100, 96, 128
_WARMUP = 60
MODEL = "llava_tiny"
PLACES = ("1/1/1|1/1/2", "1/1/2|1/1/1", "2/1/1|1/1/2", "1/2/1|2/1/1")
_SECONDS = 7200.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is frozen, as cells name it, and from which rate to which the rest trains."""

    trained: tuple[str, ...]
    rates: tuple[str, str]

    def flags(self, steps: int) -> list[str]:
        """Of training."""
        most, least = self.rates
        warmup = str(steps * _WARMUP // STEPS)
        return [
            *("--lr", most, "--min-lr", least, "--lr-decay-style", "cosine"),
            *("--lr-warmup-iters", warmup, "--weight-decay", "0", "--clip-grad", "0"),
            *("--adam-beta1", "0.9", "--adam-beta2", "0.95"),
            *(flag for each in self.trained for flag in TRAINED[each]),
        ]


SETTINGS = {
    "decoder frozen": Setting(
        trained=("all but the encoder", "all but the decoder"), rates=("1e-3", "2e-5")
    ),
    "decoder trained": Setting(trained=("all but the encoder",), rates=("1e-4", "1e-5")),
}


def losses(rank: int, *, flags: Sequence[str]) -> list[float]:
    """Of each step."""
    from loongplug.training.run import run

    return [report.loss for report in run(flags) if report.loss is not None]


def curve(flags: Sequence[str], *, ranks: int) -> list[float]:
    """A run's, which is the same on all of its ranks."""
    found, *others = run_ranks(losses, ranks, flags=flags, timeout=_SECONDS)
    assert others == [found] * (ranks - 1)
    return found


def largest_range(curves: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Largest minus least loss of all curves in one step, and that step's number from 1."""
    ranges = [max(step) - min(step) for step in zip(*curves.values(), strict=True)]
    largest = max(ranges)
    return largest, ranges.index(largest) + 1


def curves_of(
    setting: Setting, *, data: Path, weights: Path, steps: int, places: Sequence[str] = PLACES
) -> dict[str, list[float]]:
    """By place, the single rank's first."""
    flags = [*base(data, steps), "--load-hf", str(weights), *setting.flags(steps)]
    found = {"single rank": curve(flags, ranks=1)}
    for place in places:
        cell = placed(place, model=MODEL)
        found[place] = curve([*flags, *cell.flags()], ranks=cell.ranks)
    return found


def base(data: Path, steps: int) -> list[str]:
    """Flags of every run."""
    return [
        *("--device", "cpu", "--model-name", MODEL, "--training-phase", "sft"),
        *("--tokenizer-model", str(data / "processor_llava")),
        *("--train-data-path", str(data / "train.jsonl"), "--seq-length", str(SEQ_LENGTH)),
        *("--micro-batch-size", "6", "--global-batch-size", str(BATCH)),
        *("--train-iters", str(steps), "--eval-iters", "0", "--log-interval", "1"),
        *("--rerun-mode", "disabled", "--seed", "1234"),
    ]


def make_weights(data: Path, folder: Path) -> None:
    """Those that all runs start from: drawn, and not trained."""
    still = ("--lr", "0", "--min-lr", "0", "--save-hf", str(folder))
    curve([*base(data, 1), *still], ranks=1)


def table_of(name: str, curves: Mapping[str, Sequence[float]]) -> Table:
    """Some losses of each curve, and how far it is from the single rank's at most."""
    single = curves["single rank"]
    shown = sorted({1, *(max(1, len(single) * part // 4) for part in range(1, 5))})
    largest, step = largest_range(curves)
    title = f"{name}: the largest range is {largest:.1e}, in step {step}"
    table = Table("place", *(f"loss {number}" for number in shown), "apart by at most", title=title)
    for place, found in curves.items():
        apart = max(abs(a - b) for a, b in zip(found, single, strict=True))
        table.add_row(place, *(f"{found[number - 1]:.6f}" for number in shown), f"{apart:.1e}")
    return table


def main() -> None:
    """Print a table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, found = Console(), {}
    with tempfile.TemporaryDirectory(prefix="loongplug-curves-") as name:
        weights = Path(name) / "weights"
        make_weights(options.data, weights)
        for title, setting in SETTINGS.items():
            with console.status(title):
                found[title] = curves_of(
                    setting, data=options.data, weights=weights, steps=options.steps
                )
            console.print(table_of(title, found[title]))
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
