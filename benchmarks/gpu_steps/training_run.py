"""One measured training run through the public flags, for a process of its own."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from gpu_steps.host_waits import Wait, Waits
from gpu_steps.kernel_trace import KernelTrace, Profiled
from gpu_steps.layer_clock import LayerClock, LayerTimes
from gpu_steps.timing import milliseconds, stamp, wait_for

type Extra = Literal["profile", "waits"]
type AfterRun = Callable[[Any], None]  # with the model


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run measured in its steps behind the warm-up."""

    startup_seconds: float  # from the start of the process to the first step
    first_step_seconds: float
    step_seconds: tuple[float, ...]
    step_tokens: tuple[int, ...]  # before padding
    fill: float
    forward_backward_ms: tuple[float, ...]
    optimizer_ms: tuple[float, ...]
    peak_bytes: int
    losses: tuple[float, ...]
    profile: KernelTrace | None = None
    waits: tuple[Wait, ...] | None = None
    layers: LayerTimes | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all measured steps together."""
        return sum(self.step_tokens) / sum(self.step_seconds)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """``warmup + steps`` iterations of what ``flags`` say, then one for each of ``extras``.

    ``began`` is ``time.time()`` at the start of the process; ``folder`` takes the profiler's file.
    """

    flags: tuple[str, ...]
    warmup: int
    steps: int
    began: float
    folder: Path
    extras: tuple[Extra, ...] = ()
    times_layers: bool = False
    after: AfterRun | None = None


def training_run(settings: RunSettings) -> RunFigures:
    """Train and measure."""
    from loongplug.platform import requested_device
    from loongplug.train import started

    if requested_device(settings.flags) == "cpu":
        _leave_gpus_alone()
    failure: Exception | None = None
    figures: RunFigures | None = None
    with started(settings.flags):
        try:
            figures = _trained(settings)
        except Exception as error:  # the failure board would end this process without a reason
            failure = error
    if failure is not None:
        raise failure
    assert figures is not None
    return figures


def _leave_gpus_alone() -> None:
    """A CPU run as on a machine without a GPU; several of them share the cores."""
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _trained(settings: RunSettings) -> RunFigures:
    from loongplug.platform import current_platform
    from loongplug.training.progress import StepReport
    from loongplug.training.run import run

    warmup, steps, extras = settings.warmup, settings.steps, settings.extras
    iterations = f"--train-iters={warmup + steps + len(extras)}"
    platform = current_platform()
    clock = _StepClock(platform.name, times_layers=settings.times_layers)
    looks = {warmup + steps + number: extra for number, extra in enumerate(extras)}
    on_going: list[Profiled | Waits] = []

    def update_begins() -> None:
        for look in on_going:
            if isinstance(look, Waits):
                look.update_begins()

    clock.update_begins = update_begins
    profile: KernelTrace | None = None
    waits: tuple[Wait, ...] | None = None
    peak = 0

    def after_step(report: StepReport) -> None:
        nonlocal peak, profile, waits
        if report.iteration == warmup:
            platform.reset_peak_memory()
        if report.iteration == warmup + steps:
            peak = platform.peak_memory_bytes()
        for look in on_going:
            if isinstance(look, Waits):
                waits = look.end()
            else:
                profile = look.end()
        on_going.clear()
        extra = looks.get(report.iteration)
        if extra is not None:
            path = settings.folder / f"profile-{os.getpid()}.json"
            on_going.append(
                Profiled(path, device=platform.name) if extra == "profile" else Waits(platform.name)
            )

    # So short a run would be all warm-up by most schedules.
    flags = (*settings.flags, iterations, "--lr-decay-iters=1000000")
    reports = run(flags, on_report=after_step, watch=clock)
    if settings.after is not None:
        settings.after(clock.model())
    measured = slice(warmup, warmup + steps)
    timed = clock.milliseconds()[measured]
    return RunFigures(
        startup_seconds=clock.first_step_at - settings.began,
        first_step_seconds=reports[0].seconds,
        step_seconds=tuple(report.seconds for report in reports[measured]),
        step_tokens=tuple(report.tokens for report in reports[measured]),
        fill=sum(each.tokens for each in reports[measured])
        / sum(each.capacity for each in reports[measured]),
        forward_backward_ms=tuple(each[0] for each in timed),
        optimizer_ms=tuple(each[1] for each in timed),
        peak_bytes=peak,
        losses=tuple(each.loss for each in reports[measured] if each.loss is not None),
        profile=profile,
        waits=waits,
        layers=clock.layers.times() if clock.layers is not None else None,
    )


class _StepClock:
    """Stamps where a step's gradients are zeroed, and around its optimizer.

    What lies before the optimizer is forward and backward, with the encoder's phases and the wait
    for data. See :class:`loongplug.training.run.Watch`.
    """

    def __init__(self, device: str, *, times_layers: bool) -> None:
        self._device = device
        self._steps: list[list[Any]] = []
        self._times_layers = times_layers
        self.layers: LayerClock | None = None
        self.first_step_at = 0.0  # time.time()
        self._chunk: Any = None
        self.update_begins: Callable[[], None] = lambda: None

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Any) -> None:
        """Look on at every step from now on."""
        self._chunk = chunks[0]
        if self._times_layers:
            layers = self.model().text_decoder.decoder.layers
            self.layers = LayerClock(list(layers), device=self._device)
        zero, step = optimizer.zero_grad, optimizer.step

        def begins(*args: Any, **kwargs: Any) -> None:
            zero(*args, **kwargs)
            self.first_step_at = self.first_step_at or time.time()
            self._steps.append([stamp(self._device)])

        def updates() -> Any:
            self._steps[-1].append(stamp(self._device))
            self.update_begins()
            result = step()
            self._steps[-1].append(stamp(self._device))
            return result

        optimizer.zero_grad, optimizer.step = begins, updates

    def loss(self, microbatch: Any, report: Any) -> None:
        """Reports have the losses."""

    def model(self) -> Any:
        """The rank's model within Megatron's wrappers."""
        from megatron.core.utils import get_attr_wrapped_model

        return get_attr_wrapped_model(self._chunk, "text_decoder", return_model_obj=True)

    def milliseconds(self) -> list[tuple[float, float]]:
        """Of every step: forward and backward, optimizer."""
        wait_for(self._device)
        whole = [step for step in self._steps if len(step) == 3]
        return [(milliseconds(*step[:2]), milliseconds(*step[1:])) for step in whole]


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None
