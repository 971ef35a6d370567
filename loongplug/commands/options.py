"""Options that several commands have, and what becomes of a user's errors."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loongplug.output_files import Kind, check_output, figures


def _finite(value: float | None) -> float | None:
    """NaN and infinity pass for numbers, and NaN is not below any least one."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Files = Annotated[
    list[str],
    typer.Argument(
        help="JSONL or Parquet files, also of s3://, and saved datasets: p1 p2, or with weights"
        " w1 p1 w2 p2."
    ),
]
TokenizerModel = Annotated[
    Path, typer.Option(help="The folder of the model's tokenizer and processors.")
]
Phase = Annotated[str, typer.Option(help="pretrain or sft.")]
MediaRoot = Annotated[
    str | None,
    typer.Option(help="Relative paths of media start here. Default: the data file's folder."),
]
ConfineMedia = Annotated[
    bool,
    typer.Option("--confine-media", help="Refuse media outside of that folder."),
]
VideoFps = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        callback=_finite,
        help="Frames per second to take from video files. Default: the folder's.",
    ),
]
MinPixels = Annotated[
    int | None, typer.Option(help="The least pixels of each image. Default: the folder's.")
]
MaxPixels = Annotated[
    int | None, typer.Option(help="The most pixels of each image. Default: the folder's.")
]
VideoMinPixels = Annotated[
    int | None,
    typer.Option(help="The least pixels of each video, counted as its processor counts."),
]
VideoMaxPixels = Annotated[
    int | None,
    typer.Option(help="The most pixels of each video, counted as its processor counts."),
]
MaxRowMib = Annotated[int, typer.Option(min=1, help="A larger row is a bad sample.")]
SpecialTokensInText = Annotated[
    bool,
    typer.Option(
        "--special-tokens-in-text",
        help="Read special tokens in the text of rows as special tokens.",
    ),
]
IgnoreKeys = Annotated[str, typer.Option(metavar="KEY,...", help="Keys to count, not to refuse.")]
Columns = Annotated[
    str, typer.Option(metavar="OURS=THEIRS,...", help="Our names for rows' keys: query=question.")
]
LiteralMarkers = Annotated[
    bool, typer.Option("--literal-markers", help="Do not count <image> and the like as text.")
]
MultiTurnRule = Annotated[
    Literal["split", "last"],
    typer.Option(help="What becomes of turns that are rendered differently; split: as in packs."),
]
TemplateThought = Annotated[bool, typer.Option(help="As in training.")]
IndexDir = Annotated[
    Path | None, typer.Option(help="Where indexes of rows lie. Default: beside the data.")
]
Processes = Annotated[
    int | None, typer.Option(help="Processes at a time. Default: one for each processor.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Ranks = Annotated[int, typer.Option(help="Processes on this machine.")]
Warmup = Annotated[int, typer.Option(help="Steps before the measured ones.")]
Steps = Annotated[int, typer.Option(help="Measured steps.")]
Rounds = Annotated[int, typer.Option(help="How often each side is measured.")]
# Of commands that hand on what is not an option of theirs.
HANDS_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],  # else -h would be handed on
}


@contextmanager
def user_errors(
    json_path: Path | None = None,
    kind: Kind = "metrics",
    *,
    words: Iterable[str] = (),
    flags: Sequence[str] = (),
    code: int = 1,
) -> Iterator[None]:
    """A ValueError is the user's: one sentence, and the exit code.

    Also of what is at ``json_path``, and of the training ``flags`` that a command takes.
    """
    try:
        check_output(json_path, figures(kind), inputs=[*words, *flags])
        if flags:
            from loongplug.training.launch import check_before_torch

            check_before_torch(flags)
        yield
    except ValueError as error:
        typer.echo(f"loongplug: error: {error}", err=True)
        raise typer.Exit(code) from None


def phase_named(name: str) -> Literal["pretrain", "sft"]:
    """What ``--training-phase`` names. Raises ValueError for anything else."""
    if name == "pretrain":
        return "pretrain"
    if name == "sft":
        return "sft"
    raise ValueError(f"--training-phase is {name!r}: expected pretrain or sft.")
