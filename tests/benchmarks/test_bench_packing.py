"""The packing benchmark: the target's floor, and what it prints and writes."""

import json

import pytest
from micro.packing import run, skewed_lengths
from pace import times_slower

from loongplug.data.packing import packs_once

pytestmark = pytest.mark.quick


def next_fit(lengths: list[int]) -> int:
    """The least there is to do: packs filled in order, none of them looked at again."""
    packs, room = 0, 0
    for length in lengths:
        if length > room:
            packs, room = packs + 1, 8192
        room -= length
    return packs


@pytest.mark.not_quick
def test_it_is_fast_and_full_and_says_so(tmp_path, capsys):
    path = tmp_path / "packing.json"
    lengths = skewed_lengths(100_000, seq_length=8192)
    slower = times_slower(
        lambda: list(packs_once(lengths, seq_length=8192, look_ahead=256)),
        lambda: next_fit(lengths),
        turns=3,
    )
    figures = run(samples=100_000, seq_length=8192, look_ahead=256, json_path=path)
    assert slower < 120  # measured: 43; looking at each of those held would be thousands
    assert figures.fill_rate > 0.98
    assert figures.padded_fill_rate < 0.2
    printed = capsys.readouterr().out
    assert f"planned in {figures.seconds:.2f} s" in printed
    assert f"{figures.fill_rate:.1%}" in printed
    written = json.loads(path.read_text())
    assert written["packs"] == figures.packs
    assert written["fill_rate"] == figures.fill_rate
