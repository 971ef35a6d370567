"""``bench.py context``: rows whose tokens lie on two ranks, a core each, sides in turn."""

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID

from loongplug.consoles import table_console, threadless_bars
from loongplug.output_files import write_figures
from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import run_ranks
from modes import CONTEXT
from modes.context_work import (
    IMAGES,
    RANKS,
    ContextComparison,
    ContextWork,
    Side,
    comparisons,
    run_flags,
    write_data,
)

if TYPE_CHECKING:
    from modes.context_attention import AttentionFigures
    from modes.context_figures import ContextFigures, ContextStepFigures
    from modes.context_runs import ContextRunFigures

_ATTENTION_SECONDS = 1800.0
_ALONE = Side(name="one rank", ranks=1)


def bench_context(
    *, rounds: int, json_path: Path | None, work: ContextWork | None = None
) -> "ContextFigures":
    """Measure, print a table, write ``json_path`` if given. A side that a rule refuses is told.

    Raises:
        ValueError: ``rounds`` is below 1.
        RankError: a rank failed.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}: expected at least 1.")
    work = work or ContextWork()
    preload("cpu")  # what is below brings Megatron
    from modes.context_figures import ContextFigures, as_json, print_figures

    with (
        tempfile.TemporaryDirectory(prefix="loongplug-context-") as name,
        threadless_bars() as progress,
    ):
        folder = Path(name)
        write_data(work, folder)
        attention = _attention(work, rounds=rounds, folder=folder, progress=progress)
        bench = _Runs(work, folder=folder, progress=progress)
        steps, refused = bench.measure(comparisons(work), rounds=rounds)
        figures = ContextFigures(
            attention=attention,
            steps=steps,
            refused=refused,
            encoder_share=bench.encoder_share(),
        )
    print_figures(figures, console=table_console())
    write_figures(json_path, as_json(figures, work=work, rounds=rounds), CONTEXT)
    return figures


def _attention(
    work: ContextWork, *, rounds: int, folder: Path, progress: Progress
) -> "AttentionFigures":
    from modes.context_attention import measured_attention

    task = progress.add_task("attention", total=RANKS * (1 + rounds))

    def told(_: str) -> None:
        progress.advance(task)
        progress.refresh()

    ranks = folder / "attention"
    found: list[AttentionFigures] = run_ranks(
        partial(measured_attention, work=work, rounds=rounds, folder=ranks),
        RANKS,
        folder=ranks,
        on_event=told,
        timeout=_ATTENTION_SECONDS,
    )
    return found[0]


class _Runs:
    """Runs of whole steps, each in a folder of its own, from the same weights for all sides."""

    def __init__(self, work: ContextWork, *, folder: Path, progress: Progress) -> None:
        self._work, self._folder, self._progress = work, folder, progress
        self._runs = 0
        self._weights: dict[str, str] = {}  # folders, by data

    def measure(
        self, sides: Sequence[ContextComparison], *, rounds: int
    ) -> tuple[list["ContextStepFigures"], dict[str, str]]:
        """The figures of each comparison, and by name why others could not be made."""
        from modes.context_figures import ContextStepFigures

        found: dict[str, list[tuple[ContextRunFigures, ContextRunFigures]]] = defaultdict(list)
        refused: dict[str, str] = {}
        task = self._progress.add_task(
            "steps", total=2 * rounds * len(sides) * self._work.iterations
        )
        for number in range(rounds):
            for each in sides:
                if each.name in refused:
                    continue
                # What is new comes first: if it is refused, nothing else has to be run.
                turn = [each.side, each.base][:: -1 if number % 2 else 1]
                try:
                    runs = {side: self._run(side, each.data, task=task) for side in turn}
                except ValueError as error:
                    refused[each.name] = str(error)
                    continue
                found[each.name].append((runs[each.side], runs[each.base]))
        return [
            ContextStepFigures.of(each, found[each.name])
            for each in sides
            if each.name not in refused
        ], refused

    def encoder_share(self) -> float:
        """Of the work of images on one rank, by a trace."""
        from loongplug.observe.trace_file import read_folder
        from modes.levels_figures import traced_figures

        trace = self._folder / "trace"
        self._run(replace(_ALONE, flags=("--trace", str(trace))), IMAGES)
        return traced_figures(read_folder(trace), warmup=self._work.warmup).encoder_share

    def _run(self, side: Side, data: str, *, task: TaskID | None = None) -> "ContextRunFigures":
        from modes.context_runs import measured_run

        def stepped() -> None:
            if task is not None:
                self._progress.advance(task)
                self._progress.refresh()

        self._runs += 1
        flags = run_flags(self._work, data=data, folder=self._folder)
        return measured_run(
            [*flags, "--load-hf", self._weights_for(data), *side.flags],
            ranks=side.ranks,
            warmup=self._work.warmup,
            folder=self._folder / f"run-{self._runs}",
            on_step=stepped,
        )

    def _weights_for(self, data: str) -> str:
        """Random ones of the model that takes these data: ranks draw each their own."""
        from modes.context_runs import measured_run

        if data not in self._weights:
            folder = self._folder / f"weights-{data}"
            still = ("--lr", "0", "--min-lr", "0", "--train-iters", "1", "--save-hf", str(folder))
            measured_run(
                [*run_flags(self._work, data=data, folder=self._folder), *still],
                ranks=_ALONE.ranks,
                warmup=0,
                folder=self._folder / f"makes-{data}",
                on_step=lambda: None,
            )
            self._weights[data] = str(folder)
        return self._weights[data]
