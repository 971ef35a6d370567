"""The bench of levels: what it runs, what it makes of it, and one small run of it."""

import json

import pytest
from modes.levels import bench_levels
from modes.levels_clock import clock_ms
from modes.levels_figures import phases
from modes.levels_work import (
    APART,
    FULL,
    HETERO_DP,
    HETERO_TP,
    SEQ_LENGTH,
    STREAMED,
    TUNED,
    UNIFORM,
    Setting,
    Work,
    split_candidates,
    write_levels_data,
)

from loongplug.data.processor_folder import load_processor
from loongplug.observe.trace_file import TraceEvent

MS = 1_000_000


def event(phase: str, start: int, end: int, step: int = 3, **details: int) -> TraceEvent:
    return TraceEvent(
        phase=phase, name=phase, start=start * MS, end=end * MS, step=step, details=details
    )


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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "setting", "encoding", "took"),
    [
        (UNIFORM, Setting(name="PP2", pp=2), (0, 0), 9 * 30),
        (FULL, Setting(name="PP2", pp=2), (40, 40), 40 + 9 * 30 + 80),
        # Rank 1 alone decodes behind the first microbatch's features and before its last gradient.
        (APART, Setting(name="PP2", pp=2), (0, 80), 10 + 8 * 30 + 20),
        (UNIFORM, Setting(name="TP2", tp=2), (40, 40), 8 * 30 + 40 + 80),
        (HETERO_TP, Setting(name="TP2", tp=2), (40, 40), 8 * 30 + 40 + 80),
        (HETERO_DP, Setting(name="TP2", tp=2), (40, 40), 8 * 30 + 40 + 80),
    ],
)
def test_a_level_by_the_clock_is_its_schedule(level, setting, encoding, took):
    """Of 8 microbatches, whose passes take 10 and 20 ms, with 1 and 5 ms beside them."""
    decoding = {"decoder forward": 80, "decoder backward": 160, "data": 1, "optimizer": 5}
    nothing = dict.fromkeys(phases((0, 0), []), 0.0)
    phase_ms = [
        nothing | decoding | {"encoder forward": each, "encoder backward": 2 * each}
        for each in encoding
    ]
    assert clock_ms(level, setting, phase_ms, microbatches=8) == pytest.approx(took + 6)


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
