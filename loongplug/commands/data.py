"""``loongplug data``."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loongplug.commands.options import (
    Columns,
    ConfineMedia,
    Files,
    IgnoreKeys,
    IndexDir,
    LiteralMarkers,
    MaxPixels,
    MaxRowMib,
    MediaRoot,
    MinPixels,
    MultiTurnRule,
    Phase,
    Processes,
    SpecialTokensInText,
    TemplateThought,
    TokenizerModel,
    VideoFps,
    VideoMaxPixels,
    VideoMinPixels,
    phase_named,
    user_errors,
)
from loongplug.data.data_options import MAX_ROW_MIB
from loongplug.platform.without_torch import transformers_without_torch

if TYPE_CHECKING:
    from loongplug.data.survey_settings import SurveySettings

_SMALL = 2**20  # bytes of a file that is looked through first
_TEXT = re.compile(r"\.jsonl?$")
_VIDEO = re.compile(rb"video|\\u00", re.IGNORECASE)  # or a letter of it by its number

data = typer.Typer(help="Check training data, index them, look at samples.", no_args_is_help=True)


@data.command("check")
def data_check(
    context: typer.Context,
    files: Files,
    tokenizer_model: TokenizerModel,
    seq_length: Annotated[int, typer.Option(help="The longest sample, in tokens.")],
    training_phase: Phase = "sft",
    media_root: MediaRoot = None,
    confine_media: ConfineMedia = False,
    video_fps: VideoFps = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    video_min_pixels: VideoMinPixels = None,
    video_max_pixels: VideoMaxPixels = None,
    max_row_mib: MaxRowMib = MAX_ROW_MIB,
    special_tokens_in_text: SpecialTokensInText = False,
    ignore_keys: IgnoreKeys = "",
    columns: Columns = "",
    literal_markers: LiteralMarkers = False,
    multi_turn: MultiTurnRule = "last",
    train_template_thought: TemplateThought = False,
    index_dir: IndexDir = None,
    processes: Processes = None,
) -> None:
    """Read every row as training would, decode its media, and print what is wrong.

    The first five of each fault, with file and line, and how many more there are. Ends with exit
    code 1 when there is one.
    """
    light = _say_nothing_of_videos(files, context)
    with user_errors(), transformers_without_torch() if light else nullcontext():
        from loongplug.data.check import check as run

        bad = run(
            files,
            _settings(context),
            seq_length=seq_length,
            literal_markers=literal_markers,
            processes=processes,
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
def data_index(
    context: typer.Context,
    files: Files,
    tokenizer_model: TokenizerModel,
    training_phase: Phase = "sft",
    media_root: MediaRoot = None,
    confine_media: ConfineMedia = False,
    video_fps: VideoFps = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    video_min_pixels: VideoMinPixels = None,
    video_max_pixels: VideoMaxPixels = None,
    max_row_mib: MaxRowMib = MAX_ROW_MIB,
    special_tokens_in_text: SpecialTokensInText = False,
    ignore_keys: IgnoreKeys = "",
    columns: Columns = "",
    multi_turn: MultiTurnRule = "split",
    train_template_thought: TemplateThought = False,
    index_dir: IndexDir = None,
    processes: Processes = None,
) -> None:
    """Keep how large each row's sample and media are, so that each rank reads only its own.

    The index lies beside each file, and training finds it there. Rows that cannot be used are
    printed as by data check, which leaves such an index, too.
    """
    with user_errors():
        from loongplug.data.check import index as run

        run(files, _settings(context), processes=processes)


@data.command("inspect")
def data_inspect(
    context: typer.Context,
    files: Files,
    tokenizer_model: TokenizerModel,
    training_phase: Phase = "sft",
    media_root: MediaRoot = None,
    confine_media: ConfineMedia = False,
    video_fps: VideoFps = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    video_min_pixels: VideoMinPixels = None,
    video_max_pixels: VideoMaxPixels = None,
    max_row_mib: MaxRowMib = MAX_ROW_MIB,
    special_tokens_in_text: SpecialTokensInText = False,
    ignore_keys: IgnoreKeys = "",
    columns: Columns = "",
    literal_markers: LiteralMarkers = False,
    multi_turn: MultiTurnRule = "last",
    train_template_thought: TemplateThought = False,
    samples: Annotated[
        int, typer.Option(help="How many to show, spread evenly over the file.")
    ] = 3,
    plots: Annotated[
        Path | None, typer.Option(help="A folder for histograms of all rows as PNG.")
    ] = None,
    processes: Processes = None,
) -> None:
    """Show samples as the model will see them: tokens and which are trained, images and sizes."""
    with user_errors():
        from loongplug.data.inspect import inspect as run

        run(
            files,
            _settings(context),
            literal_markers=literal_markers,
            samples=samples,
            plots=plots,
            processes=processes,
        )


def _settings(context: typer.Context) -> "SurveySettings":
    from loongplug.data.survey_settings import SurveySettings

    phase = phase_named(context.params["training_phase"])
    return SurveySettings.of(context.params, training_phase=phase)
