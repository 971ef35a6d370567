"""How long samples are, and what packing would make of them: a table for people."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from loongplug.data.extents import RowExtent
from loongplug.data.packing import LOOK_AHEAD, packs_once
from loongplug.data.processor import Processor

_COLUMNS = (("median", 50), ("90 %", 90), ("99 %", 99), ("longest", 100))


def tokens_of(extent: RowExtent, processor: Processor) -> tuple[int, int, int]:
    """Of a sample: all, those that hold places of images and videos, and those of sounds."""
    places = processor.places("image", "video")
    visual = sum(run.length for run in extent.runs if run.token in places)
    return extent.tokens, visual, sum(run.length for run in extent.runs) - visual


def length_table(tokens: Sequence[int], visual: Sequence[int], audio: Sequence[int] = ()) -> Table:
    """Lengths of samples in tokens, and how many are of images and videos, and of sounds.

    There is one of each by sample; what no sample has of sounds is left out.
    """
    table = Table(title="Lengths in tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    rows = [("samples", tokens), ("visual tokens", visual)]
    if any(audio):
        rows.append(("audio tokens", audio))
    for name, values in rows:
        # Lengths that are there, none between two of them.
        found = np.percentile(values, [share for _, share in _COLUMNS], method="higher")
        table.add_row(name, *(f"{value:,.0f}" for value in found))
    return table


def fill_words(tokens: Sequence[int], *, seq_length: int) -> str:
    """One sentence: what is longer than a sequence, and how full sequences would be."""
    fitting = [length for length in tokens if length <= seq_length]
    above = (len(tokens) - len(fitting)) / len(tokens)
    said = f"{above:.1%} of the samples are longer than --seq-length {seq_length:,}."
    if not fitting:
        return said
    padded = sum(fitting) / (len(fitting) * seq_length)
    packed = sum(fitting) / (packs_of(fitting, seq_length=seq_length) * seq_length)
    return (
        f"{said} Padded to that length, sequences are {padded:.1%} full; with --packing,"
        f" {packed:.1%} (of these rows in this order)."
    )


def packs_of(tokens: Sequence[int], *, seq_length: int) -> int:
    """How many sequences training would pack samples of such lengths into, in this order."""
    return sum(1 for _ in packs_once(tokens, seq_length=seq_length, look_ahead=LOOK_AHEAD))
