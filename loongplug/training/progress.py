"""What a person sees while training runs: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch.distributed import ReduceOp, all_reduce, get_world_size

from loongplug.data.sample import BAD_KINDS
from loongplug.training.forward_step import ForwardStep


@dataclass(frozen=True)
class StepReport:
    """What the log knows after an iteration; the same on every rank."""

    iteration: int
    loss: float | None  # mean of the iterations since the last report that had tokens; None of none
    tokens: int  # tokens before padding since the last report, over all data parallel ranks
    capacity: int  # the same with padding
    seconds: float  # wall time since the last report, evaluation and saving included
    iterations: int = 1  # since the last report
    learning_rate: float | None = None  # of the last iteration; None where no rank trains anything
    grad_norm: float | None = None  # of the last iteration
    operations: int = 0  # of the model since the last report, over all ranks
    ranks: int = 1
    peak_tflops: float | None = None  # of one rank's device; None where it is not known
    memory_bytes: int = 0  # the most that any rank has held

    @property
    def fill_rate(self) -> float:
        """The share of the sequences that is not padding."""
        return self.tokens / self.capacity if self.capacity > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """Figures that Megatron does not log of a step, by name; no MFU without a known peak."""
        rate = 1 / self.seconds if self.seconds > 0 else 0.0
        tflops = self.operations * rate / self.ranks / 1e12
        return {
            "fill rate": self.fill_rate,
            "step seconds": self.seconds / self.iterations,
            "tokens per second": self.tokens * rate,
            "TFLOPs per rank": tflops,
            **({} if self.peak_tflops is None else {"MFU": tflops / self.peak_tflops}),
            "memory GiB": self.memory_bytes / 2**30,
        }

    def line(self, *, total: int) -> str:
        """A line of all figures for a person, in a run of ``total`` iterations."""
        known = self.scalars()
        figures = [f"iteration {self.iteration}/{total}", f"loss {_said(self.loss)}"]
        if self.learning_rate is not None:
            figures.append(f"lr {self.learning_rate:.3g}")
        if self.grad_norm is not None:
            figures.append(f"grad norm {self.grad_norm:.3f}")
        figures += [
            f"{known['step seconds']:.3g} s/step",
            f"{known['tokens per second']:,.0f} tokens/s",
            f"{known['TFLOPs per rank']:.3g} TFLOP/s per rank",
        ]
        if "MFU" in known:
            figures.append(f"MFU {known['MFU']:.1%}")
        figures.append(f"{100 * (1 - self.fill_rate):.0f} % padding")
        if self.memory_bytes:
            figures.append(f"{known['memory GiB']:.2f} GiB")
        return " | ".join(figures)


def _said(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f}"


class Display:
    """A line for each report, on a terminal above a bar with the loss and the time that is left.

    What is printed to ``stream`` besides, and errors on a terminal, come above the bar.
    """

    def __init__(self, stream: TextIO, *, total: int) -> None:
        terminal = stream.isatty()
        self._total = total
        self._task: TaskID | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(file=stream, force_terminal=terminal),
            redirect_stdout=terminal and sys.stdout is stream,
            redirect_stderr=terminal and sys.stderr.isatty(),
            speed_estimate_period=math.inf,  # a step may take minutes
            disable=not terminal,
        )
        self._bar.start()

    def stepped(self, iteration: int) -> None:
        if self._task is None:  # a resumed run starts where it was, which is no speed
            self._task = self._bar.add_task("", total=self._total, completed=iteration, loss="")
        self._bar.update(self._task, completed=iteration)

    def report(self, step: StepReport) -> None:
        assert self._task is not None, "it follows its step"
        self._bar.update(self._task, loss=_said(step.loss))
        left = self._bar.tasks[self._task].time_remaining if self._bar.disable else None
        self.say(step.line(total=self._total) + ("" if left is None else f" | {left:.0f} s left"))

    def say(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


@dataclass(kw_only=True, eq=False)
class TrainingProgress:
    """Collects reports on every rank, shows them on rank 0, sums the run up.

    Bad pixels are met by the one rank of a replica that loads them, all other bad samples by every
    rank of it: the latter are summed over the ranks that count tokens.

    Collective: every rank calls :meth:`step` in every iteration; every ``interval`` iterations
    (and in the first and last one) two all-reduces bring together what ranks know. Between reports
    nothing waits for the device.
    """

    total: int
    interval: int
    device: torch.device
    counter: ForwardStep
    counts_tokens: bool  # this rank speaks for its data parallel replica (tp 0, stage 0)
    has_loss: bool  # this rank speaks for the loss (the last stage's tp 0 of replica 0)
    sink: Display | None
    on_report: Callable[[StepReport], None] | None = None  # called on every rank
    met: Mapping[str, int] = field(default_factory=dict)  # bad samples of this rank so far
    news: Callable[[], list[str]] = list  # remarks on rows that this rank met
    memory: Callable[[], int] = int  # the most bytes that this rank has held
    peak_tflops: float | None = None  # of this rank's device

    def __post_init__(self) -> None:
        self.bad_samples: dict[str, int] = {}  # of all replicas, by kind; none that is 0
        self.valid_loss: float | None = None  # of the last evaluation
        self.valid_exact_match: float | None = None  # the share of its answers that are right
        self.reports: list[StepReport] = []
        self.iteration = 0
        self._losses: list[torch.Tensor] = []
        self._empty_steps = 0  # that were said
        self._counted = (0, 0, 0)  # tokens, capacity and operations of the reports so far
        self._last_time: float | None = None

    def step(
        self,
        iteration: int,
        loss: torch.Tensor | None,
        *,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Take note of one iteration; ``loss`` is set on the last stage."""
        self.iteration = iteration
        if self.counter.empty_steps > self._empty_steps and self.sink is not None:
            self.sink.say(f"iteration {iteration} | no token to train on: it changes nothing")
        self._empty_steps = self.counter.empty_steps
        if self.sink is not None:
            self.sink.stepped(iteration)
        if loss is not None:
            self._losses.append(loss.detach().float().reshape(()))
        if iteration % self.interval == 0 or iteration == self.total or not self.reports:
            self._report(iteration, learning_rate=learning_rate, grad_norm=grad_norm)

    def evaluated(
        self, loss: torch.Tensor | None, *, answered: tuple[int, int] | None = None
    ) -> None:
        """Take note of an evaluation; ``loss`` is set on the last stage. Every rank enters.

        ``answered``: how many answers of this data parallel replica are right, and of how many.
        One without a trained token has no loss, and ends no run: the training is sound.
        """
        tokens = torch.stack(self.counter.valid_tokens).sum() if self.counter.valid_tokens else 0
        self.counter.valid_tokens.clear()
        all_loss, counted, right, asked = self._sum(
            loss.item() if self.has_loss and loss is not None else 0.0,
            float(tokens),
            *(answered if answered is not None and self.counts_tokens else (0, 0)),
        )
        self.valid_loss = all_loss if counted else None
        said = _said(self.valid_loss)
        if self.valid_loss is None:
            said += ": no validation row has a trained token; loongplug data check tells why"
        if asked:
            self.valid_exact_match = right / asked
            said += f" | exact match {right / asked:.1%} of {asked:.0f} answers"
        if self.sink is not None:
            self.sink.say(f"iteration {self.iteration} | validation loss {said}")

    def _reduced(self, values: Iterable[float], op: ReduceOp.RedOpType) -> list[float]:
        """Over all ranks; float64 is exact for counts far beyond any run's."""
        found = torch.tensor([*values], dtype=torch.float64, device=self.device)
        all_reduce(found, op)
        result: list[float] = found.tolist()
        return result

    def _sum(self, *values: float) -> list[float]:
        return self._reduced(values, ReduceOp.SUM)

    def _report(
        self, iteration: int, *, learning_rate: float | None, grad_norm: float | None
    ) -> None:
        counts = self.counter.tokens, self.counter.capacity, self.counter.operations
        speaks = self.counts_tokens
        loss = torch.stack(self._losses).mean() if self._losses else torch.zeros(())
        all_loss, losses, tokens, capacity, operations, *bad = self._sum(
            loss.item() if self.has_loss else 0.0,
            len(self._losses) if self.has_loss else 0,
            *(now - then if speaks else 0 for now, then in zip(counts, self._counted, strict=True)),
            *(self.met.get(kind, 0) if speaks or kind == "pixels" else 0 for kind in BAD_KINDS),
        )
        self.bad_samples = {
            kind: int(count) for kind, count in zip(BAD_KINDS, bad, strict=True) if count
        }
        # The largest that any rank has; none is negative.
        mine = (-1.0 if each is None else each for each in (learning_rate, grad_norm))
        rate, norm, memory = self._reduced((*mine, self.memory()), ReduceOp.MAX)
        now = time.monotonic()
        since = self._last_time if self._last_time is not None else self.counter.started
        report = StepReport(
            iteration=iteration,
            loss=all_loss if losses else None,
            tokens=int(tokens),
            capacity=int(capacity),
            # The first step of a rank without the decoder is not timed.
            seconds=0.0 if since is None else now - since,
            iterations=iteration - self.reports[-1].iteration if self.reports else 1,
            learning_rate=None if rate < 0 else rate,
            grad_norm=None if norm < 0 else norm,
            operations=int(operations),
            ranks=get_world_size(),
            peak_tflops=self.peak_tflops,
            memory_bytes=int(memory),
        )
        self._losses.clear()
        self._counted, self._last_time = counts, now
        self.reports.append(report)
        if self.sink is not None:
            for line in self.news():
                self.sink.say(line)
            self.sink.report(report)
        if self.on_report is not None:
            self.on_report(report)

    def close(self) -> None:
        if self.sink is None:
            return
        if self.bad_samples:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.bad_samples.items())
            what = "bad samples" if self.bad_samples.keys() - {"masked"} else "samples"
            self.sink.say(f"{what} left out: {sum(self.bad_samples.values())} ({kinds})")
        if self._empty_steps:
            self.sink.say(f"steps without a token to train on: {self._empty_steps}")
        self.sink.close()


def summarize(
    reports: Sequence[StepReport],
    *,
    valid_loss: float | None,
    valid_exact_match: float | None = None,
    bad_samples: Mapping[str, int] | None = None,
    empty_steps: int = 0,
) -> dict[str, Any]:
    """The figures of a run with at least one report, as ``--metrics-json`` has them.

    The first report holds start-up costs; the rate is that of all others when there are any.
    Losses are None where no step had a token to train on. A run that asked for no answers has no
    score of them.
    """
    steady = reports[1:] or reports
    losses = [step.loss for step in reports if step.loss is not None]
    matched = {} if valid_exact_match is None else {"valid_exact_match": valid_exact_match}
    return {
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "tokens_per_second": sum(step.tokens for step in steady)
        / sum(step.seconds for step in steady),
        "fill_rate": sum(step.tokens for step in reports) / sum(step.capacity for step in reports),
        "train_seconds": sum(step.seconds for step in reports),
        "iterations": reports[-1].iteration,
        "valid_loss": valid_loss,
        **matched,
        "bad_samples": dict(bad_samples or {}),
        "empty_steps": empty_steps,
    }
