"""What ``loongplug bench levels`` prints and writes."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loongplug.bench.levels_figures import PHASES, SettingFigures
from loongplug.bench.levels_plan import Work
from loongplug.bench.step import spread

_WIDTH = 132  # of the wider table
_MIB = 2**20


def print_settings(settings: Sequence[SettingFigures], *, console: Console) -> None:
    """Two tables for each setting."""
    for figures in settings:
        console.print(rates_table(figures))
        console.print(phases_table(figures))


def rates_table(figures: SettingFigures) -> Table:
    """Speed, what an exchange moves, memory; one row for each level."""
    table = Table(title=_title(figures), title_justify="left")
    table.add_column("level", no_wrap=True)
    for title in (
        "tokens/s, median (range)",
        "x uniform",
        "processor ms\nper step by rank",
        "exchanged\nMB per step",
        "peak MiB\nby rank",
        "losses apart\nby at most",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for each in figures.levels:
        table.add_row(
            each.level,
            spread(each.tokens_per_second, form=",.0f"),
            spread(each.ratios, form=".2f"),
            " ".join(f"{seconds * 1e3:,.0f}" for seconds in each.processor_seconds),
            f"{each.traced.exchange_bytes / 1e6:.2f}",
            " ".join(f"{peak / _MIB:,.0f}" for peak in each.peak_memory_bytes),
            f"{each.loss_difference:.1e}",
        )
    return table


def phases_table(figures: SettingFigures) -> Table:
    """Milliseconds of a step, one row for each rank of each level."""
    table = Table(title="ms per step", title_justify="left")
    table.add_column("level", no_wrap=True)
    table.add_column("rank", justify="right")
    for phase in PHASES:
        table.add_column(phase.replace(" ", "\n"), justify="right")
    for each in figures.levels:
        for rank, took in enumerate(each.traced.phase_ms):
            table.add_row(
                each.level if rank == 0 else "",
                str(rank),
                *(f"{took[phase]:,.0f}" for phase in PHASES),
            )
        table.add_section()
    return table


def wide_console() -> Console:
    """As wide as the tables, whatever the terminal is."""
    return Console(width=max(Console().width, _WIDTH))


def write_json(path: Path, settings: Sequence[SettingFigures], *, work: Work, rounds: int) -> None:
    """All figures, round by round."""
    content = {
        "work": dataclasses.asdict(work),
        "rounds": rounds,
        "settings": [
            dataclasses.asdict(each) | {"encoder_share": each.encoder_share} for each in settings
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _title(figures: SettingFigures) -> str:
    tuned = ""
    if figures.splits:
        tried = ", ".join(f"{first}: {rate:,.0f}" for first, rate in figures.splits.items())
        tuned = f"; first-stage layers tried: tokens/s are {tried}"
    return (
        f"{figures.setting}, {figures.ranks} ranks; the encoder is {figures.encoder_share:.0%} of"
        f" the work{tuned}"
    )
