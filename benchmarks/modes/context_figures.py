"""What ``bench.py context`` makes of its runs: a table, beside what figures should be."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from loongplug.bench.step import spread
from modes.context_attention import AttentionFigures
from modes.context_runs import ContextRunFigures
from modes.context_work import LONG, ContextComparison, ContextWork


@dataclass(frozen=True, kw_only=True)
class ContextStepFigures:
    """One comparison of whole steps; rates and ratios are by round."""

    name: str
    data: str
    sides: tuple[str, str]  # what is new, and what it is held against
    rates: tuple[tuple[float, float], ...]  # tokens a second before padding
    wanted: float
    loss_difference: float  # the largest of all steps
    activations: tuple[int, int]  # bytes of a decoder's forward

    @classmethod
    def of(
        cls,
        comparison: ContextComparison,
        runs: Sequence[tuple[ContextRunFigures, ContextRunFigures]],
    ) -> "ContextStepFigures":
        """Of the runs of both sides by round."""
        new, base = runs[0]
        return cls(
            name=comparison.name,
            data=comparison.data,
            sides=(comparison.side.name, comparison.base.name),
            rates=tuple((one.rate, other.rate) for one, other in runs),
            wanted=comparison.wanted,
            loss_difference=max(
                abs(mine - theirs)
                for one, other in runs
                for mine, theirs in zip(one.losses, other.losses, strict=True)
            ),
            activations=(new.activations, base.activations),
        )

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times the base's rate."""
        return tuple(new / base for new, base in self.rates)


@dataclass(frozen=True, kw_only=True)
class ContextFigures:
    """All of it. ``refused`` says by name why a comparison was left out."""

    attention: AttentionFigures
    steps: Sequence[ContextStepFigures]
    refused: Mapping[str, str]
    encoder_share: float  # of the work of images on one rank

    @property
    def activations(self) -> float:
        """What a decoder keeps of a long row at cp 2, over one rank."""
        new, base = next(each.activations for each in self.steps if each.data == LONG)
        return new / base


def print_figures(figures: ContextFigures, *, console: Console) -> None:
    """One table, and what was left out."""
    table = Table("figure", "measured", "wanted", title="rows whose tokens lie on two ranks")
    for row in _rows(figures):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"Images: the encoder is {figures.encoder_share:.0%} of one rank's work.", soft_wrap=True
    )
    for name, reason in figures.refused.items():
        console.print(f"Left out: {name}: {reason}", soft_wrap=True)


def _rows(figures: ContextFigures) -> Iterator[tuple[str, str, str]]:
    attention = figures.attention
    yield "error to float64, fp32", f"{attention.error:.1e}", "at most 2e-6"
    yield "tiles over one call", spread(attention.tiles, form=".3f"), "at most 1.05"
    yield "decoder activations, cp 2 over one rank", f"{figures.activations:.3f}", "at most 0.55"
    yield "wire elements over 6 T G d (N - 1) / N", f"{attention.wire:.3f}", "at most 1.05"
    for each in figures.steps:
        apart = f"{spread(each.ratios, form='.2f')}, losses {each.loss_difference:.0e} apart"
        yield each.name, apart, f"at least {each.wanted}"
    yield (
        "attention of packs: lpt over zigzag",
        spread(attention.lpt_over_zigzag, form=".2f"),
        "at least 1.2",
    )
    yield "the most that lpt can gain by count, attention alone", f"{attention.most:.2f}", ""
    yield (
        "slowest rank over mean by count, lpt (zigzag)",
        f"{attention.imbalance_lpt:.3f} ({attention.imbalance_zigzag:.2f})",
        "at most 1.01",
    )
    yield "plan of a long pack for 8 ranks, ms", f"{attention.plan_ms:.2f}", "below 1"


def as_json(figures: ContextFigures, *, work: ContextWork, rounds: int) -> dict[str, Any]:
    """All figures, round by round."""
    return {
        "work": dataclasses.asdict(work),
        "rounds": rounds,
        **dataclasses.asdict(figures),
        "activations": figures.activations,
    }
