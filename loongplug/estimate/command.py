"""``loongplug estimate``: from the flags of a run, or of several layouts of it, to a table."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from loongplug.consoles import table_console
from loongplug.estimate.estimate import RankMemory
from loongplug.estimate.estimate import estimate as estimate_run
from loongplug.estimate.run_of_flags import media_rows, quiet, run_of
from loongplug.estimate.ways_to_fit import SECONDS, Found, changes_of, flags_of, ways_to_fit
from loongplug.output_files import write_figures
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import shown_name

FITS, TOO_LARGE = 0, 1
GB = 10**9
USABLE = 0.9  # of a device: its libraries, fragments and peaks of communication have the rest
_OF_NCCL = 160 * 2**20  # what others have measured that a communicator takes, on their hardware


@dataclass(frozen=True, kw_only=True)
class EstimatedLayout:
    """The memory of a layout's run by ``stages``, or why a start would refuse it.

    ``flags`` are what it has beside those of the command. ``rows`` are those that encoders take of
    each microbatch of a step.
    """

    name: str
    flags: str
    parsed: ParsedArguments | None = None
    rows: tuple[int, ...] = ()
    stages: Sequence[RankMemory] = ()
    refused: str | None = None

    @property
    def fullest(self) -> RankMemory:
        return max(self.stages, key=lambda each: each.total)

    @property
    def title(self) -> str:
        assert self.parsed is not None
        args = self.parsed.args
        return f"{shown_name(args)}, {args.ranks} rank(s)"


def estimate(
    flags: Sequence[str],
    *,
    ranks: int,
    layouts: Sequence[str] = (),
    visual_tokens: int | None = None,
    device_memory: float | None = None,
    json_path: Path | None = None,
) -> int:
    """Run the command; gives its exit code, :data:`FITS` or :data:`TOO_LARGE`.

    With ``layouts``, each one's flags, in one text as for a shell, follow ``flags``; it fits where
    one of them does. ``visual_tokens`` are those of :func:`run_of`. ``device_memory`` is in GB, of
    which :data:`USABLE` may be filled; without it, whatever comes out fits. Raises ValueError where
    the flags or the options cannot be used.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}: expected how many the run will have, 1 or more")
    if device_memory is not None and device_memory <= 0:
        raise ValueError(f"--device-memory is {device_memory}: expected GB, above 0")
    with TemporaryDirectory(prefix="loongplug-estimate-") as folder:
        shown = Console(stderr=True).status("")  # what is at work, on a terminal

        def layout(own: str, *, name: str) -> EstimatedLayout:
            shown.update(name)
            found, run = EstimatedLayout(name=name, flags=own), [*flags, *shlex.split(own)]
            try:
                parsed, step_of = run_of(
                    run, ranks=ranks, visual_tokens=visual_tokens, folder=Path(folder)
                )
                with quiet():
                    stages = estimate_run(parsed, step_of)
            except ValueError as error:
                return replace(found, refused=str(error))
            rows = tuple(map(media_rows, step_of({0: None})))
            return replace(found, parsed=parsed, rows=rows, stages=stages)

        with shown:
            found = [
                layout(own, name=f"layout {number}" if layouts else "it")
                for number, own in enumerate(layouts or [""], 1)
            ]
        possible = [each for each in found if each.refused is None]
        if not possible:
            raise ValueError("\n".join(dict.fromkeys(str(each.refused) for each in found)))
        smallest = min(possible, key=lambda each: each.fullest.total)
        if layouts:
            _print_layouts(found, device_memory=device_memory)
        else:
            _print_stages(smallest)
        write_figures(json_path, _as_json(found, several=bool(layouts)), "estimate")
        if device_memory is None:
            return FITS
        needs, fits = smallest.fullest.total, partial(fits_in, device_memory=device_memory)
        print(
            f"{f'{smallest.name} ' if layouts else ''}"
            f"{'fits' if fits(needs) else 'does not fit'}: the fullest rank needs {needs / GB:.4g} "
            f"of {USABLE * device_memory:.4g} GB; {1 - USABLE:.0%} of the device's "
            f"{device_memory:g} GB are kept free for its own libraries"
        )
        if fits(needs):
            return FITS

        def with_changes(changes: str) -> int | None:
            tried = layout(f"{smallest.flags} {changes}", name=changes)
            return tried.fullest.total if tried.refused is None else None

        assert smallest.parsed is not None
        with shown:
            ways = ways_to_fit(
                [*changes_of(smallest.parsed)], needs=needs, estimate=with_changes, fits=fits
            )
    _print_what_to_change(ways, name=smallest.name)
    return TOO_LARGE


def fits_in(nbytes: int, *, device_memory: float) -> bool:
    """Whether a rank's bytes fit in the usable part of a device of so many GB."""
    return nbytes <= USABLE * device_memory * GB


def _print_what_to_change(found: Found, *, name: str) -> None:
    for changes, needs in found.ways:
        print(f"{name} fits with {flags_of(changes)}: {needs / GB:.4g} GB")
    if not found.ways:
        nearest = ""
        if found.least is not None:
            changes, needs = found.least
            nearest = f"; the least is {needs / GB:.4g} GB, with {flags_of(changes)}"
        print(
            f"none of the {found.tried} ways that were estimated makes it fit{nearest}"
            ": take more ranks or a shorter --seq-length, or train less of the model"
        )
    if not found.in_time:
        print(f"no further change was tried after {SECONDS:.0f} s of work")


def _print_stages(run: EstimatedLayout) -> None:
    found, fullest = run.stages, run.fullest
    unit, name_of_unit = _unit(fullest.total)
    table = Table(
        name_of_unit,
        title=f"{run.title}, {len(run.rows)} microbatch(es) of up to {max(run.rows)} patches and"
        " frames",
        caption="* the fullest",
    )
    for each in found:
        mark = " *" if each is fullest else ""
        table.add_column(f"stage {each.stage}{mark}\n{each.role}", justify="right")
    for name in dict.fromkeys(name for each in found for name in each.parts):
        table.add_row(name, *(_shown(each.parts.get(name, 0), unit) for each in found))
    table.add_section()
    table.add_row("total", *(_shown(each.total, unit) for each in found))
    table.add_row("at its fullest in", *(each.when for each in found))
    table.add_row("in the optimizer's step", *(_shown(each.step, unit) for each in found))
    if any(each.host for each in found):
        table.add_row("named tensors on the host", *(_shown(each.host, unit) for each in found))
    counts = [each.communicators for each in found]
    if any(counts):
        table.add_row("communicators of NCCL", *map(str, counts))
        table.add_row("and their memory **", *(_shown(each * _OF_NCCL, unit) for each in counts))
        table.caption = "* the fullest\n** not in the total; 160 MiB each, on others' hardware"
    table_console().print(table)


def _print_layouts(layouts: Sequence[EstimatedLayout], *, device_memory: float | None) -> None:
    runs = [each for each in layouts if each.refused is None]
    unit, name_of_unit = _unit(max(run.fullest.total for run in runs))
    table = Table("", "layout", "fullest", "at its fullest in", title=runs[0].title)
    table.add_column(name_of_unit, justify="right")
    table.add_column("optimizer's step", justify="right")
    if device_memory is not None:
        table.add_column(f"of {USABLE * device_memory:.4g} GB")
    for each in layouts:
        cells = ["refused"]
        if each.refused is None:
            most = each.fullest
            cells = [most.place, most.when, _shown(most.total, unit)]
            cells.append(_shown(max(stage.step for stage in each.stages), unit))
            if device_memory is not None:
                fits = fits_in(most.total, device_memory=device_memory)
                cells.append("fits" if fits else "does not fit")
        table.add_row(each.name, each.flags, *cells)
    table_console().print(table)
    for each in layouts:
        if each.refused is not None:
            print(f"{each.name} is refused: {each.refused}")


def _as_json(layouts: Sequence[EstimatedLayout], *, several: bool) -> dict[str, Any]:
    found = [
        {
            "flags": each.flags,
            "refused": each.refused,
            "stages": [{**asdict(stage), "total": stage.total} for stage in each.stages],
        }
        for each in layouts
    ]
    return {"layouts": found} if several else {"stages": found[0]["stages"]}


def _unit(nbytes: int) -> tuple[int, str]:
    return (GB, "GB") if nbytes >= GB else (10**6, "MB")


def _shown(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.2f}" if nbytes else ""
