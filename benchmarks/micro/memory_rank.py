"""One run of ``benchmarks/bench.py memory`` on forked ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loongplug.verify.ranks import OnEvent, join, run_ranks

_COLLECTIVE_MINUTES = 5.0
_RUN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank's last step held at its fullest, and the run's losses."""

    device_bytes: int
    host_bytes: int
    losses: tuple[float, ...]  # of each step; the same on every rank


def held(
    flags: Sequence[str], *, ranks: int, device: str, folder: Path, on_step: Callable[[], None]
) -> list[Held]:
    """Train as ``flags`` say; gives what each rank held. ``folder`` is new.

    Raises:
        ValueError: the flags cannot be used.
        RankError: a rank failed otherwise.
    """
    folder.mkdir(parents=True)
    return run_ranks(
        partial(_train, flags=flags, device=device, folder=folder),
        ranks,
        folder=folder / "ranks",
        on_event=lambda line: on_step(),
        timeout=_RUN_SECONDS,
    )


def _train(rank: int, tell: OnEvent, *, flags: Sequence[str], device: str, folder: Path) -> Held:
    """The life of a rank."""
    import torch.distributed as dist

    from loongplug.training.progress import StepReport

    platform = join(rank, folder=folder, device=device, minutes=_COLLECTIVE_MINUTES)
    from loongplug.training.run import run
    from micro.memory_counter import count_on

    counter, host = count_on(platform)

    def after_step(report: StepReport) -> None:
        if rank == 0:
            tell(f"step {report.iteration}")

    watch = _Steps(counter)
    reports = run(flags, watch=watch, on_report=after_step)
    dist.barrier()  # a rank that goes early would take its sockets from those that still talk
    return Held(
        device_bytes=watch.most,
        host_bytes=host.most,
        losses=tuple(each.loss for each in reports if each.loss is not None),
    )


class _Steps:
    """Counts from where a step's gradients are zeroed to where its optimizer begins.

    Weights, gradient buffers and the optimizer's state are there before the one or come behind
    the other. See :class:`loongplug.training.run.Watch`.
    """

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self.most = 0  # of the last step

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Any) -> None:
        """Look on at every step from now on."""
        zero, step = optimizer.zero_grad, optimizer.step

        def begins(*args: Any, **kwargs: Any) -> None:
            zero(*args, **kwargs)
            self._counter.begin()

        def ends() -> Any:
            self.most = self._counter.end()
            return step()

        optimizer.zero_grad, optimizer.step = begins, ends

    def loss(self, microbatch: Any, report: Any) -> None:
        """Reports have the losses."""
