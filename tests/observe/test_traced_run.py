"""Whole training runs with --trace: what they write, what it becomes, what it changes."""

import json
import sys
from collections import defaultdict

import pytest
from ranks import RankError, run_ranks

from loongplug.observe.command import trace
from loongplug.observe.hooks import StepHooks
from loongplug.observe.recorder import TraceRecorder
from loongplug.observe.trace_file import read_folder
from loongplug.observe.tracing import _table
from loongplug.platform.replacements import Replacement, resolve
from loongplug.training.run import run

PIPELINE = ("--pipeline-model-parallel-size", "2")
VIRTUAL = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")
ACTIVATION = 48 * 2 * 128 * 4  # tokens of the longest row x samples x hidden size x bytes of fp32


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags)]


def train(flags: list[str], *more: str, ranks: int = 2) -> list[float]:
    return run_ranks(losses, ranks, flags=[*flags, *more], timeout=120.0)[0]


@pytest.fixture(scope="module")
def short(flags):
    return [*flags, "--train-iters", "3"]


@pytest.fixture(scope="module")
def pipeline(short, tmp_path_factory):
    """The folder of a traced run on two stages."""
    folder = tmp_path_factory.mktemp("trace")
    train(short, *PIPELINE, "--trace", str(folder))
    return folder


def steps(events, *, step: int, phases=("forward", "backward")) -> list[str]:
    """``F0.1`` for the forward of microbatch 0 in chunk 1, by their begin."""
    chosen = [each for each in events if each.step == step and each.phase in phases]
    return [
        f"{each.phase[0].upper()}{each.details['microbatch']}.{each.details['chunk']}"
        for each in sorted(chosen, key=lambda each: each.start)
    ]


def test_the_order_is_one_forward_one_backward(pipeline):
    first, last = read_folder(pipeline)
    for step in (1, 2, 3):
        assert steps(first.events, step=step) == [
            *("F0.0", "F1.0", "B0.0", "F2.0", "B1.0", "F3.0", "B2.0", "B3.0")
        ]
        assert steps(last.events, step=step) == [
            f"{kind}{number}.0" for number in range(4) for kind in "FB"
        ]
    assert [each.label() for each in (first, last)] == ["0 tp0 pp0 dp0", "1 tp0 pp1 dp0"]


def test_stages_tell_what_they_send_and_receive(pipeline):
    for trace_, sent, received in zip(
        read_folder(pipeline),
        (("sent_next", 4), ("sent_previous", 4)),
        (("received_next", 4), ("received_previous", 4)),
        strict=True,
    ):
        totals: dict[str, int] = defaultdict(int)
        for each in trace_.events:
            if each.phase == "p2p" and each.step == 2:
                assert each.details["group"] == "pipeline_model_parallel"
                for key in ("sent_next", "sent_previous", "received_next", "received_previous"):
                    totals[key] += each.details[key]
        expected = {key: times * ACTIVATION for key, times in (sent, received)}
        assert {key: size for key, size in totals.items() if size} == expected


def test_each_event_lies_where_it_belongs(pipeline):
    first, last = read_folder(pipeline)
    for trace_ in (first, last):
        events = [each for each in trace_.events if each.step == 2]
        (whole,) = (each for each in events if each.phase == "step")
        assert all(whole.start <= each.start <= each.end <= whole.end for each in events)
        # Text for each stage, media where they are loaded: one microbatch has none.
        data = 8 if trace_ is first else 5
        for phase, times in (("optimizer", 1), ("gradients", 1), ("data", data)):
            assert sum(each.phase == phase for each in events) == times, phase
    assert inside(first, "encoder_forward", "forward") == 8  # encoder and projector
    assert inside(first, "encoder_backward", "backward") == 8
    # The first microbatch is taken before the schedule, which is told how long the rows are.
    outside = [each for each in first.events if each.step == 2 and each.phase == "data"]
    assert outside[0].name == "the step's first microbatch"
    assert inside(first, "data", "forward", but=outside[0]) == 7
    assert [each.name for each in outside].count("media") == 3
    assert not any(each.phase.startswith("encoder") for each in last.events)


def inside(trace_, phase: str, outer: str, *, but=None) -> int:
    """How many of step 2 there are, having asserted that each lies within one of ``outer``."""
    events = [each for each in trace_.events if each.step == 2]
    outers = [each for each in events if each.phase == outer]
    own = [each for each in events if each.phase == phase and each is not but]
    for each in own:
        assert any(one.start <= each.start <= each.end <= one.end for one in outers)
    return len(own)


def test_the_merged_trace_is_whole(pipeline, capsys):
    trace(pipeline, step=None)
    rows = json.loads((pipeline / "trace.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == {0, 1}
    assert {row["ph"] for row in rows} == {"M", "X", "s", "f"}
    for rank in (0, 1):
        for lane in (0, 1, 2):
            assert_nested([r for r in rows if (r["pid"], r["tid"]) == (rank, lane)])
    assert_arrows(rows, number=3 * 8)
    assert (pipeline / "timeline.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "Step 3: shares of each rank's time" in said
    assert "warm-up" in said
    trace(pipeline, step=1)
    assert "Step 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--step is 4: .* from 1 to 3"):
        trace(pipeline, step=4)


def assert_nested(rows) -> None:
    """Each begin has its end, and no two overlap without one lying in the other."""
    open_ends: list[float] = []
    spans = [row for row in rows if row["ph"] == "X"]
    assert spans
    for row in sorted(spans, key=lambda row: (row["ts"], -row["dur"])):
        assert row["dur"] >= 0
        while open_ends and open_ends[-1] <= row["ts"] + 1e-6:
            open_ends.pop()
        end = row["ts"] + row["dur"]
        assert not open_ends or end <= open_ends[-1] + 1e-3, row
        open_ends.append(end)


def assert_arrows(rows, *, number: int) -> None:
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert len(starts) == number
    assert starts.keys() == ends.keys()
    for key, start in starts.items():
        assert start["pid"] != ends[key]["pid"]
        assert start["ts"] < ends[key]["ts"]


def test_virtual_chunks_are_numbered(short, tmp_path):
    traced = train(short, *VIRTUAL, "--train-iters", "1", "--trace", str(tmp_path))
    assert traced == train(short, *VIRTUAL, "--train-iters", "1")
    forwards = ["F0.0", "F1.0", "F0.1", "F1.1", "F2.0", "F3.0", "F2.1", "F3.1"]
    backwards = ["B0.1", "B1.1", "B0.0", "B1.0", "B2.1", "B3.1", "B2.0", "B3.0"]
    for warm_up, one in zip((4, 2), read_folder(tmp_path), strict=True):
        steady = zip(forwards[warm_up:], backwards, strict=False)
        expected = [
            *forwards[:warm_up],
            *(each for pair in steady for each in pair),
            *backwards[8 - warm_up :],
        ]
        assert steps(one.events, step=1) == expected


def test_overlapped_transfers_are_waited_for_in_the_trace(short, tmp_path):
    overlapped = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    train(short, *overlapped, "--trace", str(tmp_path))
    for one in read_folder(tmp_path):
        names = {each.name for each in one.events if each.step == 3}
        assert {"gradient reduction", "parameter gather", "reduce_scatter_tensor"} <= names


def test_evaluation_and_saving_are_outside_of_steps(short, demo, tmp_path):
    train(
        short,
        *("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1"),
        *("--eval-interval", "2", "--save", str(tmp_path / "save")),
        *(*PIPELINE, "--trace", str(tmp_path / "trace")),
    )
    for one in read_folder(tmp_path / "trace"):
        found = [each for each in one.events if each.phase in ("evaluation", "checkpoint")]
        assert {each.phase for each in found} == {"evaluation", "checkpoint"}
        assert all(each.step is None for each in found)
        in_steps = [each for each in one.events if each.phase == "forward" and each.step]
        assert len(in_steps) == 3 * 4


def failing(rank: int, *, flags: list[str]) -> None:
    def fail(report) -> None:
        if report.iteration == 2:
            raise RuntimeError("stopped here")

    run(flags, on_report=fail)


def test_a_run_that_fails_leaves_its_trace(short, tmp_path, capsys):
    with pytest.raises(RankError, match="stopped here"):
        run_ranks(failing, 2, flags=[*short, *PIPELINE, "--trace", str(tmp_path)])
    assert [each.whole_steps() for each in read_folder(tmp_path)] == [{1, 2}, {1, 2}]
    trace(tmp_path, step=None)
    assert "Step 2" in capsys.readouterr().out


WRAPPED = _table(StepHooks(TraceRecorder(list), on_first_model=lambda: None)).rows


def is_traced(row: Replacement) -> bool:
    function = resolve(row)[2]
    while function is not None:
        if "/observe/" in function.__code__.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def count_traced(rank: int, *, flags: list[str]) -> set[int]:
    """How many targets go through a wrapper in the run, and when it is over."""
    counts = set()
    run(flags, on_report=lambda _: counts.add(sum(map(is_traced, WRAPPED))))
    return counts | {-sum(map(is_traced, WRAPPED))}


def test_nothing_is_hooked_without_the_flag(short, tmp_path):
    once = [*short, "--train-iters", "1"]
    assert run_ranks(count_traced, 1, flags=once) == [{0}]
    traced_run = [*once, "--trace", str(tmp_path)]
    assert run_ranks(count_traced, 1, flags=traced_run) == [{len(WRAPPED), 0}]


@pytest.mark.quick
def test_without_matplotlib_the_cure_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"loongplug\[plots\]"):
        trace(tmp_path, step=None)


def test_switches_between_parallel_states_are_seen(short, tmp_path):
    own = ("--tensor-model-parallel-size", "2", "model.image_encoder.tensor_model_parallel_size=1")
    train(short, *own, "--trace", str(tmp_path))
    for trace_ in read_folder(tmp_path):
        names = [
            (each.details["before"], each.name)
            for each in trace_.events
            if each.phase == "switch" and each.step == 2
        ]
        # Encoder and projector, forward and backward, of four microbatches: there and back.
        there, back = ("text_decoder", "image_encoder"), ("image_encoder", "text_decoder")
        assert names == [there, back] * (2 * 2 * 4)
