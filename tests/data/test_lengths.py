"""Lengths of samples, and what packing makes of them."""

import pytest
from rich.console import Console

from loongplug.data.check import fill_words, length_table

pytestmark = pytest.mark.quick


def test_the_table_has_lengths_that_are_there() -> None:
    console = Console(width=80)
    with console.capture() as said:
        console.print(length_table(range(1, 1001), [7] * 1000))
    words = [line.split() for line in said.get().splitlines()]
    assert ["samples", "501", "901", "991", "1,000"] in words
    assert ["visual", "tokens", "7", "7", "7", "7"] in words


def test_the_words_count_what_does_not_fit_and_what_packing_fills() -> None:
    said = fill_words([6, 4, 6, 4, 11], seq_length=10)
    assert said.startswith("20.0% of the samples are longer than --seq-length 10.")
    assert "Padded to that length, sequences are 50.0% full; with --packing, 100.0%" in said
    assert fill_words([11], seq_length=10) == (
        "100.0% of the samples are longer than --seq-length 10."
    )
