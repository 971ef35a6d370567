"""Runs that may not differ in a bit: what each rank has seen of its own, as digests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from loongplug.data.microbatch import Microbatch
from loongplug.verify.ranks import join, new_folder, run_ranks
from loongplug.verify.replicas import digest


@dataclass
class RankBits:
    """One rank's run. Everything but ``nodes`` and ``images`` has to be the same in two runs."""

    losses: list[float] = field(default_factory=list)  # of each microbatch
    norms: list[float] = field(default_factory=list)  # of each step
    gradients: list[dict[str, int]] = field(default_factory=list)  # of each step, not clipped
    parameters: dict[str, int] = field(default_factory=dict)  # after the last step
    nodes: Counter[str] = field(default_factory=Counter)  # of the overlapped schedule, that ran
    images: list[bool] = field(default_factory=list)  # whether each microbatch has some


class BitWatch:
    """Looks on while a run trains (see :class:`loongplug.training.run.Watch`)."""

    def __init__(self) -> None:
        self.bits = RankBits()
        self._chunks: Sequence[nn.Module] = ()

    def built(self, chunks: Sequence[nn.Module], optimizer: Any, **_: Any) -> None:
        """Look on at every step of ``optimizer`` from now on."""
        self._chunks, step = chunks, optimizer.step

        def watched() -> Any:
            self.bits.gradients.append(
                {
                    name: digest(parameter.main_grad)
                    for name, parameter in self._named()
                    if parameter.requires_grad
                }
            )
            result = step()
            self.bits.norms.append(float(result[1]))
            return result

        optimizer.step = watched

    def loss(self, microbatch: Microbatch, report: tuple[Tensor, Tensor, Any]) -> None:
        """Note one microbatch; they come in order."""
        self.bits.losses.append(float(report[0]))
        self.bits.images.append(any(unit.rows for unit in microbatch.units.values()))

    def ended(self) -> RankBits:
        """What was seen, and the parameters as they are now."""
        self.bits.parameters = {name: digest(parameter) for name, parameter in self._named()}
        return self.bits

    def _named(self) -> list[tuple[str, Any]]:
        return [
            (f"{number}.{name}", parameter)
            for number, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        ]


def bits_of(
    flags: Sequence[str], *, ranks: int, folder: Path, timeout: float | None = None
) -> list[RankBits]:
    """Train as ``flags`` say on forked CPU ranks; gives each rank's.

    Raises:
        ValueError: the flags cannot be used, or ``folder`` is not empty.
        RankError: a rank failed otherwise, or ``timeout`` seconds have passed.
    """
    new_folder(folder)
    return run_ranks(
        lambda rank, tell: _bits_of_rank(rank, flags=flags, folder=folder),
        ranks,
        folder=folder / "ranks",
        timeout=timeout,
    )


def _bits_of_rank(rank: int, *, flags: Sequence[str], folder: Path) -> RankBits:
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    from loongplug.training.run import run
    from loongplug.verify.step_recorder import COLLECTIVE_MINUTES

    join(rank, folder=folder, device="cpu", minutes=COLLECTIVE_MINUTES)
    watch, forward = BitWatch(), ScheduleNode._forward

    def counted(node: Any, *inputs: Any) -> Any:
        watch.bits.nodes[node.name] += 1
        return forward(node, *inputs)

    ScheduleNode._forward = counted
    run(flags, watch=watch)
    bits = watch.ended()
    dist.barrier()  # a rank that goes early would take its sockets from those that still talk
    return bits


def first_difference(found: Sequence[RankBits], expected: Sequence[RankBits]) -> str:
    """Where two runs part, in words; nothing where they don't."""
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for what in ("losses", "norms", "gradients", "parameters"):
            if getattr(ours, what) != getattr(theirs, what):
                return f"{what} of rank {rank} differ"
    return ""
