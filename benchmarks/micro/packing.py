"""How long packing takes to plan, and how full its sequences are."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from loongplug.data.packing import packs_once

# Parts of the mix: share, median and spread (sigma of the logarithm) of the lengths in tokens.
_MIX = ((0.6, 300, 0.8), (0.3, 1500, 0.5), (0.1, 4000, 0.4))


@dataclass(frozen=True, kw_only=True)
class PackingFigures:
    """What was measured, on which samples."""

    samples: int
    seq_length: int
    look_ahead: int
    tokens: int  # of all samples
    packs: int
    seconds: float

    @property
    def fill_rate(self) -> float:
        """Share of the packs' tokens that are no padding."""
        return self.tokens / (self.packs * self.seq_length)

    @property
    def padded_fill_rate(self) -> float:
        """The same for one sample per sequence."""
        return self.tokens / (self.samples * self.seq_length)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        rates = {"fill_rate": self.fill_rate, "padded_fill_rate": self.padded_fill_rate}
        path.write_text(json.dumps({**asdict(self), **rates}, indent=2) + "\n")


def skewed_lengths(count: int, *, seq_length: int, seed: int = 0) -> list[int]:
    """Lengths as of a mixed data set: many short chats, fewer with images, some long ones."""
    random = np.random.RandomState(seed)
    shares, medians, sigmas = (np.array(column) for column in zip(*_MIX, strict=True))
    part = random.choice(len(_MIX), size=count, p=shares)
    lengths = random.lognormal(np.log(medians)[part], sigmas[part])
    return [int(length) for length in np.clip(lengths, 1, seq_length)]


def run(
    *, samples: int, seq_length: int, look_ahead: int, json_path: Path | None = None
) -> PackingFigures:
    """Measure, print a table, and write the figures to ``json_path`` if given."""
    lengths = skewed_lengths(samples, seq_length=seq_length)
    start = perf_counter()
    packs = sum(1 for _ in packs_once(lengths, seq_length=seq_length, look_ahead=look_ahead))
    figures = PackingFigures(
        samples=samples,
        seq_length=seq_length,
        look_ahead=look_ahead,
        tokens=sum(lengths),
        packs=packs,
        seconds=perf_counter() - start,
    )
    _print(figures)
    if json_path is not None:
        figures.write(json_path)
    return figures


def _print(figures: PackingFigures) -> None:
    table = Table(
        "rows",
        "number",
        "fill rate",
        title=(
            f"{figures.samples:,} samples of {figures.tokens / figures.samples:,.0f} tokens on "
            f"average, sequences of {figures.seq_length:,}"
        ),
        caption=f"planned in {figures.seconds:.2f} s",
    )
    table.add_row("padded", f"{figures.samples:,}", f"{figures.padded_fill_rate:.1%}")
    table.add_row(
        f"packed, look-ahead {figures.look_ahead:,}",
        f"{figures.packs:,}",
        f"{figures.fill_rate:.1%}",
    )
    Console().print(table)
