"""``loongplug data``."""

import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loongplug.commands.options import Phase, of_rows, user_errors, with_options
from loongplug.platform.without_torch import transformers_without_torch

_SMALL = 2**20  # bytes of a file that is looked through first
_TEXT = re.compile(r"\.jsonl?$")
_VIDEO = re.compile(rb"video|\\u00", re.IGNORECASE)  # or a letter of it by its number

LiteralMarkers = Annotated[
    bool, typer.Option("--literal-markers", help="Do not count <image> and the like as text.")
]
MultiTurnRule = Annotated[
    Literal["split", "last"],
    typer.Option(help="What becomes of turns that are rendered differently; split: as in packs."),
]
IndexDir = Annotated[
    Path | None, typer.Option(help="Where indexes of rows lie. Default: beside the data.")
]

data = typer.Typer(help="Check training data, index them, look at samples.", no_args_is_help=True)


def _finite(value: float | None) -> float | None:
    """NaN and infinity pass for numbers, and NaN is not below any least one."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def _of_all(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            help="JSONL or Parquet files, also of s3://, and saved datasets: p1 p2, or with weights"
            " w1 p1 w2 p2."
        ),
    ],
    tokenizer_model: Annotated[
        Path, typer.Option(help="The folder of the model's tokenizer and processors.")
    ],
    training_phase: Phase = "sft",
    video_fps: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=_finite,
            help="Frames per second to take from video files. Default: the folder's.",
        ),
    ] = None,
    train_template_thought: Annotated[bool, typer.Option(help="As in training.")] = False,
    processes: Annotated[
        int | None, typer.Option(help="Processes at a time. Default: one for each processor.")
    ] = None,
) -> None:
    """The options of all commands here."""


@data.command("check")
@with_options(_of_all, of_rows)
def data_check(
    context: typer.Context,
    *,
    seq_length: Annotated[int, typer.Option(help="The longest sample, in tokens.")],
    literal_markers: LiteralMarkers = False,
    multi_turn: MultiTurnRule = "last",
    index_dir: IndexDir = None,
    **options: Any,
) -> None:
    """Read every row as training would, decode its media, and print what is wrong.

    The first five of each fault, with file and line, and how many more there are. Ends with exit
    code 1 when there is one.
    """
    light = _say_nothing_of_videos(options["files"], context)
    with user_errors(), transformers_without_torch() if light else nullcontext():
        from loongplug.data.check import check as run

        bad = run(
            options["files"],
            _settings(context),
            seq_length=seq_length,
            literal_markers=literal_markers,
            processes=options["processes"],
        )
    raise typer.Exit(1 if bad else 0)


def _say_nothing_of_videos(files: list[str], context: typer.Context) -> bool:
    """Whether small files of text have no videos, which transformers cannot take without torch."""
    said = [f"{name}={value}" for name, value in context.params.items() if value is not None]
    if any("video" in each for each in said) or not all(map(_TEXT.search, files)):
        return False
    try:
        small = [Path(name) for name in files if Path(name).is_file()]  # and no pipe
        contents = [each.read_bytes() for each in small if each.stat().st_size < _SMALL]
    except OSError:  # told by what opens them
        return False
    return len(contents) == len(files) and not any(map(_VIDEO.search, contents))


@data.command("index")
@with_options(_of_all, of_rows)
def data_index(
    context: typer.Context,
    *,
    multi_turn: MultiTurnRule = "split",
    index_dir: IndexDir = None,
    **options: Any,
) -> None:
    """Keep how large each row's sample and media are, so that each rank reads only its own.

    The index lies beside each file, and training finds it there. Rows that cannot be used are
    printed as by data check, which leaves such an index, too.
    """
    with user_errors():
        from loongplug.data.check import index as run

        run(options["files"], _settings(context), processes=options["processes"])


@data.command("inspect")
@with_options(_of_all, of_rows)
def data_inspect(
    context: typer.Context,
    *,
    literal_markers: LiteralMarkers = False,
    multi_turn: MultiTurnRule = "last",
    samples: Annotated[
        int, typer.Option(min=0, help="How many to show, spread evenly over the file.")
    ] = 3,
    plots: Annotated[
        Path | None, typer.Option(help="A folder for histograms of all rows as PNG.")
    ] = None,
    **options: Any,
) -> None:
    """Show samples as the model will see them: tokens and which are trained, images and sizes."""
    with user_errors():
        from loongplug.data.inspect import inspect as run

        run(
            options["files"],
            _settings(context),
            literal_markers=literal_markers,
            samples=samples,
            plots=plots,
            processes=options["processes"],
        )


def _settings(context: typer.Context) -> Any:
    from loongplug.data.survey_settings import SurveySettings

    return SurveySettings.of(context.params)
