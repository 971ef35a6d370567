"""What is shown and summed up while training runs."""

import io
from dataclasses import dataclass, field, replace

import pytest
import torch
from ranks import run_ranks

from loongplug.training.progress import Display, StepReport, TrainingProgress, summarize

pytestmark = pytest.mark.quick


def report(iteration: int, *, loss=1.0, tokens=100, capacity=400, seconds=2.0) -> StepReport:
    return StepReport(
        iteration=iteration, loss=loss, tokens=tokens, capacity=capacity, seconds=seconds
    )


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    display = Display(stream, total=3)
    for iteration in (1, 2, 3):
        display.stepped(iteration)
        display.report(report(iteration))
    display.close()
    lines = stream.getvalue().splitlines()
    figures = "loss 1.0000 | 2 s/step | 50 tokens/s | 0 TFLOP/s per rank | 75 % padding"
    assert lines[0] == f"iteration 1/3 | {figures}"
    assert len(lines) == 3  # one for each report, however fast they come
    assert lines[2] == f"iteration 3/3 | {figures} | 0 s left"


def test_a_line_has_the_optimizer_s_and_the_model_s_figures():
    step = replace(
        report(8, tokens=4000, capacity=5000),
        iterations=4,
        learning_rate=2.5e-4,
        grad_norm=0.125,
        operations=2 * 10**15,
        ranks=2,
        peak_tflops=1000.0,
        memory_bytes=3 * 2**29,
    )
    assert step.line(total=9) == (
        "iteration 8/9 | loss 1.0000 | lr 0.00025 | grad norm 0.125 | 0.5 s/step | 2,000 tokens/s"
        " | 500 TFLOP/s per rank | MFU 50.0% | 20 % padding | 1.50 GiB"
    )
    assert step.scalars()["MFU"] == 0.5
    assert "MFU" not in report(1).scalars()


def test_a_terminal_gets_a_bar_with_loss_and_rate():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    display = Display(stream, total=3)
    display.stepped(1)
    display.report(report(1, loss=0.25))
    display.stepped(2)
    display.close()
    assert "2/3" in stream.getvalue()  # it moves without a report
    assert stream.getvalue().count("iteration") == 1
    assert "0.2500" in stream.getvalue()
    assert "50 tokens/s" in stream.getvalue()
    assert "75 % padding" in stream.getvalue()


def test_the_rate_leaves_out_the_first_report():
    reports = [report(1, loss=4.0, capacity=200, seconds=100.0), report(5, loss=2.0), report(9)]
    metrics = summarize(reports, valid_loss=0.5)
    assert metrics["tokens_per_second"] == 50.0
    assert metrics["fill_rate"] == 0.3
    assert (metrics["loss_first"], metrics["loss_last"]) == (4.0, 1.0)
    assert (metrics["train_seconds"], metrics["iterations"]) == (104.0, 9)
    assert metrics["valid_loss"] == 0.5


@dataclass
class Counter:
    tokens: int = 0
    capacity: int = 0
    operations: int = 0
    started: float | None = 0.0
    empty_steps: int = 0
    valid_tokens: list[torch.Tensor] = field(default_factory=list)


def collect(rank: int) -> list[StepReport]:
    """Two replicas of two stages: ranks 0, 1 are the first stage, 2 and 3 the last."""
    counter = Counter()
    stream = io.StringIO()
    told = []
    progress = TrainingProgress(
        total=5,
        interval=2,
        device=torch.device("cpu"),
        counter=counter,
        counts_tokens=rank in (0, 1),
        has_loss=rank == 2,
        sink=Display(stream, total=5) if rank == 0 else None,
        on_report=told.append,
        memory=lambda: 100 * rank,
    )
    for iteration in range(1, 6):
        counter.tokens += 10 * (rank + 1)
        counter.capacity += 20 * (rank + 1)
        counter.operations += rank + 1
        counter.empty_steps += iteration in (1, 3)
        has_loss = rank >= 2 and iteration not in (1, 3)
        progress.step(
            iteration,
            torch.tensor(float(iteration)) if has_loss else None,
            learning_rate=0.5 if rank == 1 else None,
        )
    counter.valid_tokens += [torch.tensor(rank), torch.tensor(1)] if rank >= 2 else []
    # All ranks of a replica know its answers: 3 of 5 and 1 of 3 are right.
    answered = (3, 5) if rank in (0, 2) else (1, 3)
    progress.evaluated(torch.tensor(0.25) if rank >= 2 else None, answered=answered)
    assert told == progress.reports
    lines = stream.getvalue().splitlines()
    assert rank > 0 or lines[0] == "iteration 1 | no token to train on: it changes nothing"
    assert rank > 0 or lines[1].startswith("iteration 1/5 | loss none | lr 0.5")
    progress.close()
    last = "steps without a token to train on: 2"
    assert rank > 0 or stream.getvalue().splitlines()[-1] == last
    assert progress.valid_loss == 0.25
    assert progress.valid_exact_match == 0.5
    said = "iteration 5 | validation loss 0.2500 | exact match 50.0% of 8 answers\n"
    assert rank > 0 or said in stream.getvalue()
    progress.evaluated(torch.tensor(float("nan")) if rank >= 2 else None)
    assert progress.valid_loss is None
    assert rank > 0 or "iteration 5 | validation loss none: no validation row" in stream.getvalue()
    return progress.reports


def test_every_rank_has_the_last_stages_loss_and_all_replicas_tokens():
    for reports in run_ranks(collect, 4):
        assert [step.iteration for step in reports] == [1, 2, 4, 5]
        assert [step.loss for step in reports] == [None, 2.0, 4.0, 5.0]
        metrics = summarize(reports, valid_loss=None)
        assert (metrics["loss_first"], metrics["loss_last"]) == (2.0, 5.0)
        assert [step.tokens for step in reports] == [30, 30, 60, 30]
        assert [step.capacity for step in reports] == [60, 60, 120, 60]
        assert [step.operations for step in reports] == [3, 3, 6, 3]
        assert [step.iterations for step in reports] == [1, 1, 2, 1]
        assert {(step.learning_rate, step.grad_norm, step.ranks) for step in reports} == {
            (0.5, None, 4)
        }
        assert {step.memory_bytes for step in reports} == {300}


def met(rank: int) -> tuple[dict[str, int], str]:
    """Ranks 0 and 1 each speak for a replica; rank 2 is of a later stage, but decodes, too."""
    counts: dict[str, int] = {}  # it fills up while training runs
    stream = io.StringIO()
    progress = TrainingProgress(
        total=1,
        interval=1,
        device=torch.device("cpu"),
        counter=Counter(),
        counts_tokens=rank in (0, 1),
        has_loss=rank == 2,
        sink=Display(stream, total=1),
        met=counts,
    )
    counts |= {"length": 3, "pixels": rank}
    progress.step(1, None)
    progress.close()
    return progress.bad_samples, stream.getvalue()


def test_bad_samples_are_summed_over_replicas_and_told_at_the_end():
    for counts, said in run_ranks(met, 3):
        assert counts == {"length": 6, "pixels": 3}
        assert said.splitlines()[-1] == "bad samples left out: 9 (length 6, pixels 3)"
    metrics = summarize([report(1)], valid_loss=None, bad_samples={"row": 1})
    assert metrics["bad_samples"] == {"row": 1}
