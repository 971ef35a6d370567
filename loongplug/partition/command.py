"""``loongplug partition``: from the flags of a run to a split of its layers, as tables and JSON."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from loongplug.consoles import table_console
from loongplug.estimate.run_of_flags import quiet
from loongplug.output_files import write_figures
from loongplug.partition.splits import FoundSplits, find
from loongplug.partition.stages import Partition, Stage
from loongplug.training.config import shown_name

_UNITS = (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6))


def partition(
    flags: Sequence[str],
    *,
    ranks: int,
    visual_tokens: int | None = None,
    encoder_stages: Sequence[str] = (),
    json_path: Path | None = None,
) -> None:
    """Run the command.

    ``encoder_stages`` are NAME=N: encoders that have stages of their own, before the decoder's,
    on ranks that are not among ``ranks``. ``visual_tokens`` of each sample stand in for the images
    of the data; the flags need name neither data nor tokenizer then.

    Raises:
        ValueError: the flags or the options cannot be used, or there is nothing to split.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}: expected how many the run will have, 1 or more")
    with (
        Console(stderr=True).status("counting the work of each layer"),
        quiet(),
        TemporaryDirectory(prefix="loongplug-partition-") as folder,
    ):
        found = find(
            flags,
            ranks=ranks,
            visual_tokens=visual_tokens,
            encoder_stages=encoder_stages,
            folder=Path(folder),
        )
    _print_found(found)
    write_figures(json_path, _as_json(found), "partition")


def _print_found(found: FoundSplits) -> None:
    """A table of each split's stages, which one is kept, and what a run with it is given."""
    for each in found.partitions:
        _print_stages(each, found)
    aware, plain = found.partitions
    steps = f"a step of {_amount(aware.step)} frozen-aware, {_amount(plain.step)} plain"
    if aware.step == plain.step:
        print(f"{steps}: the frozen-aware split is kept, which is no slower")
    else:
        times = max(aware.step, plain.step) / min(aware.step, plain.step)
        print(f"{steps}: the {found.kept.name} split is kept, {times:.3f} times as fast")
    if found.own:
        # How long a step would take each module that waited for no other.
        steps = ", ".join(f"{name} {_amount(time)}" for name, time in found.kept.alone.items())
        slowest, _ = found.kept.slowest
        print(f"a step of each alone: {steps}; the slowest stage, which decides, is of {slowest}")
    for name in found.around:
        print(f"{name} works on all stages before and behind the schedule: it is in no stage")
    if found.around:
        print(f"of the step, {_amount(found.kept.outside)} lie before and behind the schedule")
    for name in found.apart:
        sizes = found.kept.sizes(name)
        override = f"model.{found.parsed.model.keys[name]}.stage_layers={[*sizes]}"
        print(f"{name}: {' + '.join(map(str, sizes))} layers ({override.replace(' ', '')})")
    if found.flags:
        instead = f" (in the place of {', '.join(found.replaced)})" if found.replaced else ""
        print(f"flags: {shlex.join(found.flags)}{instead}")


def _print_stages(split: Partition, found: FoundSplits) -> None:
    _, slowest = split.slowest
    name, unit = _unit(slowest)
    args = found.parsed.args
    table = Table(
        title=f"{split.name}: {shown_name(args)}, {found.microbatches} microbatch(es) of a replica",
        caption=f"{name} of a rank for a microbatch; backward with what is recomputed",
    )
    table.add_column("stage")
    for heading in ("layers", "forward", "backward", "of the slowest"):
        table.add_column(heading, justify="right")
    for each in split.stages:
        table.add_row(
            _name(each, found),
            f"{each.layers.start} to {each.layers.stop - 1}",
            f"{each.cost.forward / unit:.3f}",
            f"{each.cost.backward / unit:.3f}",
            f"{each.cost.total / slowest:.0%}",
        )
    table_console().print(table)


def _name(stage: Stage, found: FoundSplits) -> str:
    """A stage's name, with the encoders that it has before its layers."""
    name = f"{stage.entry} {stage.number}"
    first = stage.entry == found.decoder and stage.layers.start == 0
    return " + ".join([*found.inside, name]) if first else name


def _unit(operations: float) -> tuple[str, int]:
    return next((each for each in _UNITS if operations >= each[1]), _UNITS[-1])


def _amount(operations: float) -> str:
    name, unit = _unit(operations)
    return f"{operations / unit:.4g} {name}"


def _as_json(found: FoundSplits) -> dict[str, Any]:
    """The figures, in operations of a rank: of a stage for a microbatch, and of a step."""
    content: dict[str, Any] = {
        "microbatches": found.microbatches,
        "kept": found.kept.name,
        "flags": list(found.flags),
        "encoder_stages": {name: list(found.kept.sizes(name)) for name in found.apart},
        "splits": {each.name: _split(each) for each in found.partitions},
    }
    if found.own:
        content["alone"] = dict(found.kept.alone)
    return content


def _split(split: Partition) -> dict[str, Any]:
    return {
        "step": split.step,
        "outside": split.outside,
        "stages": [
            {
                "entry": each.entry,
                "stage": each.number,
                "layers": len(each.layers),
                "forward": each.cost.forward,
                "backward": each.cost.backward,
            }
            for each in split.stages
        ],
    }
