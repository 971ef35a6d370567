"""Options that several commands have, and what becomes of a user's errors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def _finite(value: float | None) -> float | None:
    """NaN and infinity pass for numbers, and NaN is not below any least one."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Files = Annotated[
    list[str],
    typer.Argument(
        help="JSONL or Parquet files, also of s3://, and saved datasets, as for --data-path: p1 p2"
        " or w1 p1 w2 p2."
    ),
]
TokenizerModel = Annotated[
    Path, typer.Option(help="The folder of the model's tokenizer and processors.")
]
Phase = Annotated[str, typer.Option(help="pretrain or sft.")]
MediaRoot = Annotated[
    str | None,
    typer.Option(help="What paths of media are relative to; else the data file's folder."),
]
ConfineMedia = Annotated[
    bool,
    typer.Option("--confine-media", help="Refuse media that lie outside of that folder."),
]
VideoFps = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        callback=_finite,
        help="Frames taken per second of video files; else the folder's.",
    ),
]
MinPixels = Annotated[
    int | None, typer.Option(help="The least pixels of each image; else the folder's.")
]
MaxPixels = Annotated[
    int | None, typer.Option(help="The most pixels of each image; else the folder's.")
]
VideoMinPixels = Annotated[
    int | None,
    typer.Option(help="The least pixels of each video, counted as its processor does."),
]
VideoMaxPixels = Annotated[
    int | None,
    typer.Option(help="The most pixels of each video, counted as its processor does."),
]
MaxRowMib = Annotated[int, typer.Option(min=1, help="A row of more MiB cannot be used.")]
SpecialTokensInText = Annotated[
    bool,
    typer.Option(
        "--special-tokens-in-text",
        help="Special tokens that are written in rows' text are special tokens; else text.",
    ),
]
Processes = Annotated[
    int | None, typer.Option(help="Processes at a time; else one for each processor.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Ranks = Annotated[int, typer.Option(help="Processes on this machine.")]
Warmup = Annotated[int, typer.Option(help="Steps before the measured ones.")]
Steps = Annotated[int, typer.Option(help="Measured steps.")]
Rounds = Annotated[int, typer.Option(help="How often each side takes its turn.")]
# Of commands that hand on what is no option of theirs.
HANDS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


@contextmanager
def user_errors() -> Iterator[None]:
    """A ValueError is the user's: one sentence, exit code 1."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"loongplug: error: {error}", err=True)
        raise typer.Exit(1) from None


def phase_named(name: str) -> Literal["pretrain", "sft"]:
    """What ``--training-phase`` names. Raises ValueError for anything else."""
    if name == "pretrain":
        return "pretrain"
    if name == "sft":
        return "sft"
    raise ValueError(f"--training-phase is {name!r}: expected pretrain or sft.")
