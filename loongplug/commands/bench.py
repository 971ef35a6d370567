"""``loongplug bench``."""

from pathlib import Path
from typing import Annotated

import typer

from loongplug.commands.options import (
    HANDS_ON,
    Json,
    Ranks,
    Steps,
    Warmup,
    user_errors,
)

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@bench.command("step", context_settings=HANDS_ON)
def bench_step(
    context: typer.Context,
    ranks: Ranks = 1,
    warmup: Warmup = 3,
    steps: Steps = 10,
    json_path: Json = None,
) -> None:
    """Measure tokens/s and peak memory of a training run, given by train.py's own flags.

    Everything that is no option of this command goes to training unchanged.
    """
    with user_errors():
        from loongplug.bench.step import bench_step as run

        run(context.args, ranks=ranks, warmup=warmup, steps=steps, json_path=json_path)


@bench.command("levels")
def bench_levels(
    rounds: Annotated[int, typer.Option(help="How often each level takes its turn.")] = 3,
    pictures: Annotated[
        Path, typer.Option(help="A folder for a picture of one step of each level.")
    ] = Path("runs/bench/levels"),
    json_path: Json = None,
) -> None:
    """Measure the levels of heterogeneous parallelism side by side on the CPU."""
    with user_errors():
        from loongplug.bench.levels import bench_levels as run

        run(rounds=rounds, json_path=json_path, pictures=pictures)
