"""The bench of context parallelism: what it makes of its runs, and one small run of it."""

import json
from pathlib import Path

import pytest
from modes.context import bench_context
from modes.context_work import ContextWork, comparisons, document_lengths, run_flags

TINY = ContextWork(
    length=512,
    pack_length=512,
    documents=3,
    layers=2,
    heads=4,
    dim=16,
    exact_length=96,
    packs=2,
    planned=1 << 14,
    image_decoder_layers=4,
    image_encoder_layers=3,
    image_encoder_size=32,
    image_microbatches=2,
    image_samples=1,
    steps=1,
)


@pytest.mark.quick
def test_documents_fill_the_row_and_differ_in_length() -> None:
    for seed in range(20):
        lengths = document_lengths(8192, seed=seed)
        assert sum(lengths) == 8192
        assert min(lengths) > 0
        assert max(lengths) > 4 * min(lengths[:-1])


@pytest.mark.quick
def test_sides_differ_in_their_flags_alone() -> None:
    work = ContextWork()
    for each in comparisons(work):
        assert each.base.flags != each.side.flags
        flags = run_flags(work, data=each.data, folder=Path("data"))
        assert not set(flags) & {"--context-parallel-size", "--packing", "--cp-balance"}


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
def test_a_small_run_measures_all_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench_context(rounds=1, json_path=tmp_path / "context.json", work=TINY)
    assert figures.attention.error <= 2e-6
    assert figures.attention.wire == 1.0
    assert figures.attention.imbalance_lpt < figures.attention.imbalance_zigzag
    assert 1 < figures.attention.most <= figures.attention.imbalance_zigzag
    # Of so short a row, what does not depend on its length still counts.
    assert 0.4 < figures.activations < 0.6
    made = {each.name for each in figures.steps}
    assert made | set(figures.refused) == {each.name for each in comparisons(TINY)}
    assert all("full separation" in name for name in figures.refused)
    for each in figures.steps:
        assert each.loss_difference < 1e-4  # the same weights, samples and steps
        assert min(rate for both in each.rates for rate in both) > 0
    shown = capsys.readouterr().out
    assert "decoder activations, cp 2 over one rank" in shown
    content = json.loads((tmp_path / "context.json").read_text())
    assert content["rounds"] == 1
    assert content["attention"]["error"] == figures.attention.error
