"""Tables and JSON of an estimate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from loongplug.consoles import table_console
from loongplug.estimate.estimate import RankMemory
from loongplug.estimate.run_of_flags import GB, USABLE, fits_in
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import shown_name

_OF_NCCL = 160 * 2**20  # what others have measured that a communicator takes, on their hardware


@dataclass(frozen=True, kw_only=True)
class EstimatedLayout:
    """The memory of a layout's run by ``stages``, or why a start would refuse it.

    ``flags`` are what makes it another run than that of other layouts, and ``name`` is what it is
    called. ``rows`` are those that encoders take of each microbatch of a step.
    """

    name: str
    flags: str
    parsed: ParsedArguments | None = None
    rows: tuple[int, ...] = ()
    stages: Sequence[RankMemory] = ()
    refused: str | None = None

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.stages, key=lambda each: each.total)

    @property
    def title(self) -> str:
        """The model and the ranks."""
        assert self.parsed is not None
        args = self.parsed.args
        return f"{shown_name(args)}, {args.ranks} rank(s)"


def print_stages(run: EstimatedLayout) -> None:
    """A table of what the fullest rank of each stage holds."""
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


def print_layouts(layouts: Sequence[EstimatedLayout], *, device_memory: float | None) -> None:
    """A table with a row for each, then why some are refused."""
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


def as_json(layouts: Sequence[EstimatedLayout], *, several: bool) -> dict[str, Any]:
    """The figures in bytes, of one run or of ``several`` layouts."""
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
