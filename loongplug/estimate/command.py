"""``loongplug estimate``: from the flags of a run to a table of what its ranks hold."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from loongplug.consoles import table_console

if TYPE_CHECKING:
    from loongplug.estimate.estimate import RankMemory
    from loongplug.estimate.state import Stepping
    from loongplug.training.arguments import ParsedArguments

FITS, TOO_LARGE = 0, 1
USABLE = 0.9  # of a device: its libraries, fragments and peaks of communication have the rest
_GB, _MB = 10**9, 10**6
# What the machine of the run has and this one may not; none of it changes what is counted.
_OF_THE_MACHINE = frozenset(("device", "transformer_impl", "distributed_backend"))


def estimate(
    flags: Sequence[str],
    *,
    ranks: int,
    visual_tokens: int | None = None,
    device_memory: float | None = None,
    json_path: Path | None = None,
) -> int:
    """Run the command; gives its exit code, :data:`FITS` or :data:`TOO_LARGE`.

    ``visual_tokens`` of each sample stand in for the images of the data; the flags need name
    neither data nor tokenizer then. ``device_memory`` is in
    GB, of which :data:`USABLE` may be filled; without it, whatever comes out fits.

    Raises:
        ValueError: the flags or the options cannot be used.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}: expected how many the run will have, 1 or more")
    if device_memory is not None and device_memory <= 0:
        raise ValueError(f"--device-memory is {device_memory}: expected GB, above 0")
    with _quiet(), TemporaryDirectory(prefix="loongplug-estimate-") as folder:
        parsed = parsed_for(
            flags, ranks=ranks, stand_ins=None if visual_tokens is None else Path(folder)
        )
        from loongplug.estimate.estimate import estimate as run
        from loongplug.estimate.units import units_of_data, units_of_size

        units = (
            units_of_data(parsed.args, parsed.model)
            if visual_tokens is None
            else units_of_size(parsed.args, parsed.model, visual_tokens=visual_tokens)
        )
        with Console(stderr=True).status("") as shown:
            found = run(
                parsed,
                units,
                stepping=stepping_of(flags),
                on_stage=lambda stage, stages: shown.update(f"stage {stage} of {stages}"),
            )
    _print(found, parsed, patches=[unit.patches for unit in units])
    if json_path is not None:
        _write(found, json_path)
    if device_memory is None:
        return FITS
    fullest = max(each.total for each in found)
    fits = fits_in(fullest, device_memory=device_memory)
    print(
        f"{'fits' if fits else 'does not fit'}: the fullest rank needs {fullest / _GB:.2f} of "
        f"{USABLE * device_memory:.4g} GB; {1 - USABLE:.0%} of the device's {device_memory:g} GB "
        "are kept free for its own libraries"
    )
    return FITS if fits else TOO_LARGE


def fits_in(nbytes: int, *, device_memory: float) -> bool:
    """Whether a rank's bytes fit in the usable part of a device of so many GB."""
    return nbytes <= USABLE * device_memory * _GB


def parsed_for(
    flags: Sequence[str], *, ranks: int, stand_ins: Path | None = None
) -> "ParsedArguments":
    """The checked arguments of the first rank, for tensors that are on no device.

    In the folder ``stand_ins`` there will be a tokenizer for flags that name none.
    """
    from loongplug.platform import activate

    activate("cpu")
    from loongplug.training.flags import read_command_line, without_flags
    from loongplug.verify.plan import first_rank

    read_command_line(flags)  # refuses what is not a flag before it is taken apart
    if stand_ins is not None:
        from loongplug.estimate.stand_in_data import with_stand_ins

        flags = with_stand_ins(flags, stand_ins)
    return first_rank([*without_flags(flags, _OF_THE_MACHINE), "--device", "cpu"], ranks=ranks)


def stepping_of(flags: Sequence[str]) -> "Stepping":
    """How the optimizer of a run with these flags works: torch's, unless they ask for another.

    Needs the platform to be active.
    """
    from loongplug.training.flags import read_command_line

    line = read_command_line(flags)
    args = line.args
    if "transformer_impl" in line.flags and args.transformer_impl == "transformer_engine":
        return "fused"
    return "one by one" if args.device == "cpu" else "all at once"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Megatron says of models that it builds."""
    logger = logging.getLogger("megatron")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _print(
    found: "Sequence[RankMemory]", parsed: "ParsedArguments", *, patches: Sequence[int]
) -> None:
    from loongplug.training.config import shown_name

    args = parsed.args
    names = list(dict.fromkeys(name for each in found for name in each.parts))
    fullest = max(found, key=lambda each: each.total)
    unit = _GB if fullest.total >= _GB else _MB
    table = Table(
        "GB" if unit == _GB else "MB",
        title=f"{shown_name(args)}, {args.world_size} rank(s), "
        f"{len(patches)} microbatch(es) of up to {max(patches)} patches",
        caption="* the fullest",
    )
    for each in found:
        mark = " *" if each is fullest else ""
        table.add_column(f"stage {each.stage}{mark}\n{each.role}", justify="right")
    for name in names:
        table.add_row(name, *(_shown(each.parts.get(name, 0), unit) for each in found))
    table.add_section()
    table.add_row("total", *(_shown(each.total, unit) for each in found))
    table.add_row("at its fullest in", *(each.when for each in found))
    table.add_row("in the optimizer's step", *(_shown(each.step, unit) for each in found))
    if any(each.host for each in found):
        table.add_row("named tensors on the host", *(_shown(each.host, unit) for each in found))
    table_console().print(table)


def _shown(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.2f}" if nbytes else ""


def _write(found: "Sequence[RankMemory]", path: Path) -> None:
    rows = [{**asdict(each), "total": each.total} for each in found]
    path.write_text(json.dumps({"stages": rows}, indent=2) + "\n")
