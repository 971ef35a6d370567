"""The bench of levels: what it runs, what it makes of it, and one small run of it."""

import json
from dataclasses import replace

import pytest
from modes.levels import bench_levels
from modes.levels_figures import (
    RunFigures,
    TracedFigures,
    fastest,
    level_figures,
    median_rate,
    phases,
    shown_step,
    traced_figures,
)
from modes.levels_work import (
    APART,
    FULL,
    SEQ_LENGTH,
    STREAMED,
    TUNED,
    UNIFORM,
    Setting,
    Work,
    split_candidates,
    write_levels_data,
)

from loongplug.data.processor import load_processor
from loongplug.observe.trace_file import RankTrace, TraceEvent

RUN = RunFigures(
    step_seconds=(1.0, 2.0, 1.0),
    step_tokens=(100, 100, 300),
    losses=(3.0, 2.0),
    processor_seconds=(0.5, 0.75),
    peak_memory_bytes=(10, 20),
)
MS = 1_000_000


def event(phase: str, start: int, end: int, step: int = 3, **details: int) -> TraceEvent:
    return TraceEvent(
        phase=phase, name=phase, start=start * MS, end=end * MS, step=step, details=details
    )


def rank_trace(rank: int, *events: TraceEvent) -> RankTrace:
    return RankTrace(rank=rank, world_size=2, device="cpu", place={}, events=events, cut_off=False)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layers", "stages", "candidates"),
    [
        (8, 2, (1, 2, 3)),
        (9, 2, (1, 2, 3, 4)),
        (8, 4, ()),
        (11, 4, (2,)),
        (10, 4, (1,)),
        (2, 2, ()),
        (8, 1, ()),
    ],
)
def test_splits_leave_the_first_stage_fewer_and_divide_the_rest(layers, stages, candidates):
    assert split_candidates(layers, stages) == candidates


@pytest.mark.quick
def test_data_fit_the_sequence_and_come_out_the_same(tmp_path):
    from loongplug.data.dataset import ChatDataset

    for name in ("once", "again"):
        write_levels_data(tmp_path / name, samples=16)
    rows = [(tmp_path / name / "train.jsonl").read_text() for name in ("once", "again")]
    assert rows[0] == rows[1]
    dataset = ChatDataset(
        tmp_path / "once" / "train.jsonl",
        processor=load_processor(tmp_path / "once" / "processor"),
        seq_length=SEQ_LENGTH,
        training_phase="sft",
    )
    lengths = [len(dataset[index].input_ids) for index in range(16)]
    assert max(lengths) <= SEQ_LENGTH
    assert min(lengths) > SEQ_LENGTH // 2


@pytest.mark.quick
def test_rates_are_medians_and_ratios_are_of_the_same_round():
    assert RUN.tokens_per_second == 100.0
    fast = replace(RUN, step_seconds=(0.5, 1.0, 0.5), losses=(3.0, 2.5), peak_memory_bytes=(30, 5))
    slow = replace(RUN, step_seconds=(2.0, 4.0, 2.0), processor_seconds=(1.5, 1.75))
    found = level_figures(
        FULL,
        [fast, slow],
        [RUN, slow],
        flags=(),
        traced=TracedFigures(phase_ms=(), exchange_bytes=0),
        picture="",
    )
    assert found.tokens_per_second == (200.0, 50.0)
    assert found.ratios == (2.0, 1.0)
    assert found.ratio == 1.5
    assert found.loss_difference == 0.5
    assert found.processor_seconds == (1.0, 1.25)
    assert found.peak_memory_bytes == (30, 20)
    assert median_rate([fast, slow, slow]) == 50.0
    # One round that was lucky does not make a variant the fastest.
    assert fastest({("a",): [fast, slow, slow], ("b",): [RUN, RUN, RUN]}) == ("b",)


@pytest.mark.quick
def test_an_exchange_within_a_forward_is_no_forward():
    events = [
        event("step", 0, 100),
        event("forward", 0, 50),
        event("encoder_forward", 0, 20),
        event("exchange", 20, 30, bytes=1),
        event("collective", 20, 30),
        event("backward", 50, 80),
        event("wait", 80, 90),
        event("gradients", 90, 92),
        event("optimizer", 92, 97),
    ]
    found = phases((0, 100 * MS), events)
    assert {phase: took / MS for phase, took in found.items()} == {
        "encoder forward": 20,
        "encoder backward": 0,
        "decoder forward": 20,
        "decoder backward": 30,
        "exchange": 10,
        "waiting": 10,
        "optimizer": 7,
        "data": 0,
        "idle": 3,
    }


def steps_of(rank: int) -> RankTrace:
    """Step 1 is a warm-up; of the others, 3 is the one of median length."""
    return rank_trace(
        rank,
        *(event("step", 0, 1000, step=1), event("exchange", 0, 900, step=1, bytes=999)),
        *(event("step", 1000, 1010, step=2), event("exchange", 1000, 1001, step=2, bytes=10)),
        *(event("step", 2000, 2030, step=3), event("exchange", 2000, 2003, step=3, bytes=40)),
        event("exchange", 2003, 2004, step=3, bytes=2),
        # As between ranks apart: what arrives counts where it is sent.
        event("exchange", 2003, 2004, step=3, bytes=2, source=1),
        event("exchange", 2003, 2004, step=3),
        *(event("step", 3000, 3050, step=4), event("exchange", 3000, 3020, step=4, bytes=100)),
        event("encoder_forward", 2004, 2010, step=3),
        event("forward", 2010, 2012, step=3),
        event("step", 4000, 4001, step=5, failed=1),
    )


@pytest.mark.quick
def test_traces_give_medians_of_the_steps_after_the_warm_up():
    traces = [steps_of(0), steps_of(1)]
    found = traced_figures(traces, warmup=1)
    assert found.exchange_bytes == 2 * 42
    assert [rank["exchange"] for rank in found.phase_ms] == [4.0, 4.0]
    number, measured = shown_step(traces, warmup=1)
    assert number == 3
    assert measured[1].window == (2000 * MS, 2030 * MS)


@pytest.mark.slow
@pytest.mark.sweep  # whole runs of a bench
def test_a_small_run_measures_and_draws_every_level(tmp_path, capsys):
    work = Work(
        decoder_layers=4,
        encoder_layers=3,
        encoder_size=32,
        micro_batch_size=1,
        microbatches=2,
        warmup=1,
        steps=1,
    )
    (figures,) = bench_levels(
        rounds=1,
        json_path=tmp_path / "levels.json",
        pictures=tmp_path / "pictures",
        work=work,
        settings=(Setting(name="PP2", pp=2),),
    )
    assert [each.level for each in figures.levels] == [UNIFORM, TUNED, FULL, STREAMED, APART]
    assert all(each.traced.exchange_bytes > 0 for each in figures.levels[2:])
    for level in figures.levels:
        assert len(level.processor_seconds) == 2
        assert min(level.processor_seconds) > 0.005
        # The same weights, samples and steps.
        assert level.loss_difference < 1e-4
        assert (tmp_path / "pictures" / level.picture.split("/")[-1]).stat().st_size > 1000
        assert any(rank["encoder backward"] > 0 for rank in level.traced.phase_ms)
        assert min(level.peak_memory_bytes) > 50 * 2**20
    assert "losses apart" in capsys.readouterr().out
    assert json.loads((tmp_path / "levels.json").read_text())["rounds"] == 1
