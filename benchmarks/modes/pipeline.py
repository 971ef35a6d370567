"""``bench.py pipeline``: modes and schedules with stages that sleep in the place of work.

A rank that sleeps needs no core, so that many ranks run on few, and what a step takes is what its
schedule makes of the times that were given.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loongplug.consoles import table_console, threadless_bars
from loongplug.observe.picture import draw_timeline
from loongplug.output_files import check_pictures, write_figures
from loongplug.verify.forked_runs import preload
from loongplug.verify.ranks import run_ranks
from modes import are_cases

if TYPE_CHECKING:
    from modes.pipeline_figures import CaseFigures
    from modes.pipeline_work import Case

_WIDTH = 120  # columns of a picture in text


def bench_pipeline(
    *,
    modes: Sequence[str],
    decoder: str,
    encoders: Sequence[str],
    pp: int,
    tp: int,
    chunks: int,
    microbatches: int,
    steps: int,
    json_path: Path | None,
    pictures: Path | None,
) -> "list[CaseFigures]":
    """Run the command: a table of the modes, and a step of each.

    Raises:
        ValueError: the options cannot be used, or ``pictures`` are asked for without matplotlib.
        RankError: a rank failed otherwise.
    """
    if steps < 1:
        raise ValueError(f"--steps is {steps}: expected at least 1.")
    preload("cpu")  # what is below brings Megatron
    from modes.pipeline_figures import as_json, legend, print_cases, print_timeline
    from modes.pipeline_work import MODES, Case, parse_encoder, parse_stages

    cases = [
        Case(
            mode=mode,
            stages=parse_stages(decoder, pp=pp),
            encoders=tuple(map(parse_encoder, encoders)),
            microbatches=microbatches,
            tp=tp,
            chunks=chunks,
        )
        for mode in modes or MODES
    ]
    check_pictures(pictures, [f"{each.mode}.png" for each in cases])
    found = measure(cases, steps=steps)
    console = table_console(least=_WIDTH)
    print_cases(found, console=console)
    console.print(legend())
    for each in found:
        print_timeline(each, console=console, width=_WIDTH)
    if pictures is not None:
        draw(found, pictures)
    write_figures(json_path, as_json(found), are_cases)
    return found


def measure(cases: "Sequence[Case]", *, steps: int) -> "list[CaseFigures]":
    """Each case in its turn, with a bar of all steps; those of one place in the same ranks.

    The process has done :func:`~loongplug.verify.forked_runs.preload` for the CPU, and so have its
    ranks.

    Raises:
        RankError: a rank failed.
    """
    from modes.pipeline_ranks import EMPTY_STEPS

    together: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, case in enumerate(cases):
        together[case.site].append(number)
    found: dict[int, CaseFigures] = {}
    with threadless_bars() as progress:
        task = progress.add_task("pipeline", total=len(cases) * (EMPTY_STEPS + steps))

        def stepped() -> None:
            progress.advance(task)
            progress.refresh()

        for numbers in together.values():
            figures = _measured([cases[each] for each in numbers], steps=steps, on_step=stepped)
            found |= zip(numbers, figures, strict=True)
    return [found[number] for number in range(len(cases))]


def _measured(
    cases: "Sequence[Case]", *, steps: int, on_step: Callable[[], None]
) -> "list[CaseFigures]":
    from modes.pipeline_figures import case_figures
    from modes.pipeline_ranks import live

    with tempfile.TemporaryDirectory(prefix="loongplug-pipeline-") as name:
        folder = Path(name)
        ranks = run_ranks(
            partial(live, cases=cases, steps=steps, folder=folder),
            cases[0].ranks,
            folder=folder / "ranks",
            on_event=lambda line: on_step(),
        )
    return [
        case_figures(case, [rank[number] for rank in ranks]) for number, case in enumerate(cases)
    ]


def draw(found: "Sequence[CaseFigures]", pictures: Path) -> None:
    """A picture of each case's shown step into the folder ``pictures``, by its mode."""
    from modes.pipeline_figures import shown_shares

    pictures.mkdir(parents=True, exist_ok=True)
    for each in found:
        (step,) = {event.step for trace in each.shown for event in trace.events}
        assert step is not None
        draw_timeline(each.shown, shown_shares(each), pictures / f"{each.case.mode}.png", step=step)
