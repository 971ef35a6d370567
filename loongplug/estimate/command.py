"""``loongplug estimate``: from the flags of a run, or of several layouts of it, to a table."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from loongplug.estimate.estimate import estimate as estimate_run
from loongplug.estimate.microbatches import media_rows
from loongplug.estimate.run_of_flags import GB, USABLE, fits_in, quiet, run_of, stepping_of
from loongplug.estimate.tables import EstimatedLayout, as_json, print_layouts, print_stages
from loongplug.estimate.ways_to_fit import SECONDS, Change, Found, changed, changes_of, ways_to_fit
from loongplug.output_files import write_figures

FITS, TOO_LARGE = 0, 1


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
    one of them does. ``visual_tokens`` of each sample stand in for the images of the data; the
    flags need name neither data nor tokenizer then. ``device_memory`` is in
    GB, of which :data:`USABLE` may be filled; without it, whatever comes out fits.

    Raises:
        ValueError: the flags or the options cannot be used.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}: expected how many the run will have, 1 or more")
    if device_memory is not None and device_memory <= 0:
        raise ValueError(f"--device-memory is {device_memory}: expected GB, above 0")
    with TemporaryDirectory(prefix="loongplug-estimate-") as folder:
        shown = Console(stderr=True).status("")  # what is at work, on a terminal

        def layout(own: str, *changes: Change, name: str) -> EstimatedLayout:
            return _estimated(
                flags,
                EstimatedLayout(name=name, flags=own),
                changes=changes,
                ranks=ranks,
                visual_tokens=visual_tokens,
                folder=Path(folder),
                told=lambda what: shown.update(f"{name}: {what}"),
            )

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
            print_layouts(found, device_memory=device_memory)
        else:
            print_stages(smallest)
        write_figures(json_path, as_json(found, several=bool(layouts)), "estimate")
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

        def with_changes(changes: Sequence[Change]) -> int | None:
            tried = layout(smallest.flags, *changes, name=" ".join(map(str, changes)))
            return tried.fullest.total if tried.refused is None else None

        assert smallest.parsed is not None
        with shown:
            ways = ways_to_fit(
                [*changes_of(smallest.parsed)], needs=needs, estimate=with_changes, fits=fits
            )
    _print_what_to_change(ways, name=smallest.name)
    return TOO_LARGE


def _estimated(
    flags: Sequence[str],
    layout: EstimatedLayout,
    *,
    changes: Sequence[Change],
    ranks: int,
    visual_tokens: int | None,
    folder: Path,
    told: Callable[[str], None],
) -> EstimatedLayout:
    """The memory of a run with a layout's flags and changes, or why a start would refuse it."""
    told("flags and data")
    try:
        run = changed([*flags, *shlex.split(layout.flags)], changes)
        parsed, step_of = run_of(run, ranks=ranks, visual_tokens=visual_tokens, folder=folder)
        with quiet():
            stages = estimate_run(
                parsed,
                step_of,
                stepping=stepping_of(run),
                on_stage=lambda stage, stages: told(f"stage {stage} of {stages}"),
            )
    except ValueError as error:
        return replace(layout, refused=str(error))
    return replace(layout, parsed=parsed, rows=tuple(map(media_rows, step_of(0))), stages=stages)


def _print_what_to_change(found: Found, *, name: str) -> None:
    """A sentence for each way to make it fit, or one on the nearest."""
    for way in found.ways:
        print(f"{name} fits with {way}: {way.needs / GB:.4g} GB")
    if not found.ways:
        least = found.least
        print(
            f"none of the {found.tried} ways that were estimated makes it fit"
            + (f"; the least is {least.needs / GB:.4g} GB, with {least}" if least else "")
            + ": take more ranks or a shorter --seq-length, or train less of the model"
        )
    if not found.in_time:
        print(f"no further change was tried after {SECONDS:.0f} s of work")
