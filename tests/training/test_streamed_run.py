"""Whole runs whose encoders work in the pipeline's bubbles: as those that are separated."""

import json
from functools import partial
from pathlib import Path

import pytest
from compared_runs import Steps, same, steps, train
from free_passes import free_passes
from layout_flags import OVERLAP, SEPARATED, SINGLES

from loongplug.hetero.executor import Executor
from loongplug.observe.trace_file import read_folder

pytestmark = pytest.mark.slow

PP2 = ("--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp")
STREAMED = ("--full-hetero-dp-schedule", "auto")


def streams(rank: int, *, flags: list[str], at_least: int) -> Steps:
    """Of a run in which so many steps stream."""
    ended = 0
    end = Executor.end

    def counted(self: Executor) -> None:
        nonlocal ended
        ended += self.streamed_passes is not None
        end(self)

    Executor.end = counted
    free_passes(rank)
    found = steps(rank, flags=flags)
    assert ended >= at_least, ended
    return found


def test_evaluations_answers_and_a_resumed_run(flags, demo, tmp_path: Path) -> None:
    """Evaluation and answers are of no stream; a run goes on separated where it has streamed."""
    common = [
        *(*flags, *PP2, *SINGLES, *OVERLAP),
        *("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1"),
        *("--eval-interval", "2", "--eval-generate", "2", "--bad-sample", "skip"),
    ]

    def metrics(name: str) -> tuple[str, ...]:
        return "--metrics-json", str(tmp_path / f"{name}.json")

    expected = train(common, *SEPARATED, *metrics("separated"), ranks=2)
    kept, traces = str(tmp_path / "run"), tmp_path / "trace"
    some = partial(streams, at_least=1)
    saves = ("--save", kept, "--save-interval", "2", "--trace", str(traces))
    train(common, *STREAMED, *saves, "--train-iters", "2", ranks=2, function=some)
    found = train(common, *STREAMED, *metrics("streamed"), ranks=2, function=some)
    assert same(found, expected), (found, expected)
    goes_on = train(common, *SEPARATED, "--load", kept, ranks=2)
    assert same(goes_on, expected[2:]), (goes_on, expected)
    of = {
        name: json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("separated", "streamed")
    }
    for figure in ("valid_loss", "valid_exact_match"):
        assert of["streamed"][figure] == pytest.approx(of["separated"][figure], rel=1e-4)
    for trace in read_folder(traces):
        names = {each.name for each in trace.events if each.phase == "exchange"}
        assert names & {"send features", "receive features"}
        assert names & {"send gradients", "receive gradients"}
        assert any(each.phase == "p2p" for each in trace.events)
