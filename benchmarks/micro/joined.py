"""Units encoded one by one, and the same units joined to one pass: time of forward and backward."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

SINGLY, JOINED = "one by one", "joined"


@dataclass(frozen=True)
class Taken:
    """Milliseconds of each round: by the clock, and of the processor."""

    clock: tuple[float, ...]
    processor: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class JoinedFigures:
    """What was measured; ``apart`` is how far gradients are apart, of the largest one."""

    units: int
    patches: int  # of a unit
    singly: Taken
    joined: Taken
    apart: float

    @property
    def speedup(self) -> float:
        """One by one over joined, by medians of the clock."""
        return median(self.singly.clock) / median(self.joined.clock)

    @property
    def of_processor(self) -> float:
        """The same of the processor."""
        return median(self.singly.processor) / median(self.joined.processor)


def run(*, units: int, side: int, rounds: int, json_path: Path | None) -> JoinedFigures:
    """Measure in turn, print a table, and write the figures to ``json_path`` if given."""
    from loongplug.train import started

    with TemporaryDirectory() as folder:
        from modes.levels_work import Work, write_levels_data

        work = Work(micro_batch_size=1, microbatches=1, warmup=0, steps=1)
        write_levels_data(Path(folder), samples=work.samples)
        flags = work.flags(Path(folder))
        found: list[JoinedFigures] = []
        with started(flags):
            found.append(_measured(flags, units=units, side=side, rounds=rounds))
    (figures,) = found
    _print(figures)
    if json_path is not None:
        facts = {**asdict(figures), "speedup": figures.speedup}
        json_path.write_text(json.dumps(facts, indent=2) + "\n")
    return figures


class _Built:
    """The rank's chunk, as a run makes it."""

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Any) -> None:
        """Keep it."""
        self.chunk = chunks[0]

    def loss(self, microbatch: Any, report: Any) -> None:
        """Nothing to look at."""


def _measured(flags: Sequence[str], *, units: int, side: int, rounds: int) -> JoinedFigures:
    import numpy as np
    import torch

    from loongplug.data.microbatch import MediaInput, Unit
    from loongplug.hetero.encoder_of_step import EncoderOfStep
    from loongplug.hetero.executor import unwrapped
    from loongplug.training.run import run as train

    torch.set_num_threads(1)
    built = _Built()
    train(flags, watch=built)
    model = unwrapped(built.chunk)
    (entry,) = model.encoders
    grid = (1, side, side)
    module: Any = model.modules_of(entry)[entry.name]
    values = module.architecture.row_values
    made = [
        Unit(
            grids=(grid,),
            places=(np.arange(side * side // 4),),
            media=MediaInput(loaded=torch.randn(side * side, values), grids=torch.tensor([grid])),
        )
        for _ in range(units)
    ]
    encoder = EncoderOfStep(built.chunk, model, entry=entry, training=True)

    def singly() -> None:
        for number, unit in enumerate(made):
            payload = encoder.payload([unit])
            encoder.backward(payload, torch.ones_like(payload), more=number + 1 < units)

    def joined() -> None:
        payload = encoder.payload(made)
        encoder.backward(payload, torch.ones_like(payload), more=False)

    parameters = list(built.chunk.parts[entry.name].module.parameters())

    def zero() -> None:
        built.chunk.zero_grad_buffer()
        for each in parameters:
            each.grad = None  # the optimizer's, of the run's step

    def gradients(encode: Callable[[], None]) -> torch.Tensor:
        zero()
        encode()
        return torch.cat([each.main_grad.flatten() for each in parameters])

    one, other = gradients(singly), gradients(joined)
    apart = float((one - other).abs().max() / one.abs().max())
    taken: dict[Callable[[], None], tuple[list[float], list[float]]] = {
        singly: ([], []),
        joined: ([], []),
    }
    for number in range(rounds):
        for encode in (singly, joined) if number % 2 else (joined, singly):
            zero()
            clock, processor = perf_counter(), process_time()
            encode()
            taken[encode][0].append((perf_counter() - clock) * 1e3)
            taken[encode][1].append((process_time() - processor) * 1e3)
    singles, together = (Taken(*map(tuple, taken[each])) for each in (singly, joined))
    return JoinedFigures(
        units=units, patches=side * side, singly=singles, joined=together, apart=apart
    )


def _print(figures: JoinedFigures) -> None:
    table = Table(
        "units",
        "ms, median (range)",
        "ms of the processor",
        title=f"{figures.units} units of {figures.patches} patches, forward and backward",
    )
    for name, taken in ((SINGLY, figures.singly), (JOINED, figures.joined)):
        low, high = min(taken.clock), max(taken.clock)
        table.add_row(
            name,
            f"{median(taken.clock):.1f} ({low:.1f} to {high:.1f})",
            f"{median(taken.processor):.1f}",
        )
    console = Console(file=sys.stdout)
    console.print(table)
    console.print(
        f"joined is {figures.speedup:.2f} times as fast, {figures.of_processor:.2f} times by the"
        f" processor; gradients are {figures.apart:.1e} of the largest one apart"
    )
