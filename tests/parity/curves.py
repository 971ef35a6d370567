"""Loss curves of one model in several places: how far apart they ever are.

As in figure C.1 and table A6 of *Heterogeneous Parallelism for Multimodal Large Language Model
Training* (Karnati et al.): LLaVA with a frozen encoder, with its decoder frozen and trained, 100
steps in fp32 from the same weights on the same samples.

    PYTHONPATH=tests python -m parity.curves DATA [STEPS]

``DATA`` is a folder made by ``scripts/make_demo_data.py``.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranks import run_ranks

from parity.option_flags import SHARED
from parity.placed import placed

STEPS = 100
_WARMUP = 0.6  # of the steps
MODEL = "llava_tiny"
PLACES = ("1/1/1|1/1/2", "1/1/2|1/1/1", "2/1/1|1/1/2", "1/2/1|2/1/1")
_SECONDS = 7200.0
# What is frozen, and from which rate to which the rest trains.
SETTINGS = {
    "decoder frozen": (("all but the encoder", "all but the decoder"), ("1e-3", "2e-5")),
    "decoder trained": (("all but the encoder",), ("1e-4", "1e-5")),
}


def losses(rank: int, *, flags: Sequence[str]) -> list[float]:
    """The loss of each step."""
    from loongplug.training.run import run

    return [report.loss for report in run(flags) if report.loss is not None]


def curve(flags: Sequence[str], *, ranks: int) -> list[float]:
    """A run's losses, which are the same on all of its ranks."""
    found, *others = run_ranks(losses, ranks, flags=flags, timeout=_SECONDS)
    assert others == [found] * (ranks - 1)
    return found


def curves_of(setting: str, *, data: Path, weights: Path, steps: int) -> dict[str, list[float]]:
    """Curves by place, the single rank's first."""
    trained, (most, least) = SETTINGS[setting]
    flags = [
        *(*_base(data, steps), "--load-hf", str(weights)),
        *("--lr", most, "--min-lr", least, "--lr-decay-style", "cosine"),
        *("--lr-warmup-iters", str(int(steps * _WARMUP))),
        *("--weight-decay", "0", "--clip-grad", "0", "--adam-beta1", "0.9", "--adam-beta2", "0.95"),
        *(flag for each in trained for flag in SHARED["trained"][each]),
    ]
    cells = {place: placed(place, model=MODEL) for place in PLACES}
    return {"single rank": curve(flags, ranks=1)} | {
        place: curve([*flags, *cell.flags()], ranks=cell.ranks) for place, cell in cells.items()
    }


def _base(data: Path, steps: int) -> list[str]:
    return [
        *("--device", "cpu", "--model-name", MODEL, "--training-phase", "sft"),
        *("--tokenizer-model", str(data / "processor_llava")),
        *("--train-data-path", str(data / "train.jsonl"), "--seq-length", "128"),
        *("--micro-batch-size", "6", "--global-batch-size", "96"),
        *("--train-iters", str(steps), "--eval-iters", "0", "--log-interval", "1"),
        *("--rerun-mode", "disabled", "--seed", "1234"),
    ]


def largest_range(curves: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Largest minus least loss of all curves in one step, and that step's number from 1."""
    ranges = [max(step) - min(step) for step in zip(*curves.values(), strict=True)]
    return max(ranges), ranges.index(max(ranges)) + 1


def main(data: Path, steps: int = STEPS) -> None:
    """Print the losses and the largest range of each setting."""
    with tempfile.TemporaryDirectory(prefix="loongplug-curves-") as name:
        weights = Path(name) / "weights"  # drawn, and not trained
        still = ("--lr", "0", "--min-lr", "0", "--save-hf", str(weights))
        curve([*_base(data, 1), *still], ranks=1)
        for setting in SETTINGS:
            curves = curves_of(setting, data=data, weights=weights, steps=steps)
            for place, found in curves.items():
                print(f"{setting}, {place}: {' '.join(f'{loss:.6f}' for loss in found)}")
            print(
                "{}: the largest range is {:.1e}, in step {}".format(
                    setting, *largest_range(curves)
                )
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
