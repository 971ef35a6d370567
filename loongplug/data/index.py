"""What ``loongplug data index`` does: tokenize every row once, and keep how long its sample is."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console

from loongplug.consoles import table_console
from loongplug.data.bad_samples import BadSample, BadSampleError, PrintedFaults
from loongplug.data.blend import Source, open_source, parse_blend
from loongplug.data.dataset import tokenize_row
from loongplug.data.length_index import LengthSettings, keep_sizes, path_of
from loongplug.data.lengths import length_table, tokens_of_media
from loongplug.data.pixel_limits import FOLDERS_LIMITS, PixelLimits
from loongplug.data.positions import Grid
from loongplug.data.processor import MultiTurn, Processor, load_processor
from loongplug.data.remarks import MASKED, Remark
from loongplug.data.row_sizes import RowSizes
from loongplug.data.rows import ANY_ROW, RowAccess
from loongplug.data.template import TrainingPhase
from loongplug.data.video import VideoProcessor, video_style_of
from loongplug.data.workers import map_rows


@dataclass(frozen=True)
class MeasuredRow:
    """How large a row's sample is; nothing, with the reason, for a row that cannot be used."""

    tokens: int = 0
    grids: tuple[Grid, ...] = ()
    answers: int = 0  # that are trained on
    visual: int = 0  # tokens of images and videos
    audio: int = 0  # tokens of sounds
    bad: BadSample | None = None
    remarks: tuple[Remark, ...] = ()


def index(
    data: Sequence[str],
    *,
    tokenizer_model: Path,
    training_phase: TrainingPhase,
    access: RowAccess = ANY_ROW,
    video_fps: float | None = None,
    special_tokens_in_text: bool = False,
    multi_turn: MultiTurn = "split",
    pixel_limits: PixelLimits = FOLDERS_LIMITS,
    processes: int | None = None,
) -> list[Path]:
    """Make the index of each of the files, in place of one that it has; gives where they are.

    ``data`` is written as for ``--data-path``; weights play no part. Of energon datasets, the split
    ``train`` is read. Rows that cannot be used go to standard output, the first of each fault; the
    progress and the sum to standard error.

    Raises:
        ValueError: one sentence on what is wrong with the folder, the files or the options.
    """
    console = table_console(stderr=True)
    paths = parse_blend(data, flag="FILES").paths
    sources = [open_source(path, split="train", access=access) for path in dict.fromkeys(paths)]
    processor = load_processor(
        tokenizer_model,
        special_tokens_in_text=special_tokens_in_text,
        multi_turn=multi_turn,
        pixel_limits=pixel_limits,
    )
    videos = VideoProcessor(processor, video_style_of(processor), fps=video_fps)
    settings = LengthSettings(
        folder=tokenizer_model,
        training_phase=training_phase,
        timestamps=videos.style.timestamps,
        video_fps=video_fps,
        special_tokens_in_text=special_tokens_in_text,
        multi_turn=multi_turn,
        pixel_limits=pixel_limits,
        access=access,
    )
    kept = []
    for source in sources:
        started, made_of = time.monotonic(), settings.made_of(source)
        lengths: list[tuple[int, int, int]] = []
        measured = map_rows(
            _measure(source, processor, videos=videos, phase=training_phase),
            len(source),
            processes=processes,
            console=console,
            title="indexing rows",
        )
        sizes = RowSizes.of(_printed(measured, lengths))
        if settings.made_of(source) != made_of:
            raise ValueError(f"{path_of(source)} changed while it was read: index it again.")
        place = keep_sizes(source, sizes, made_of=made_of)
        rows = len(source) - sizes.remarks.found.get(MASKED, (0, ""))[0]
        seconds = time.monotonic() - started
        _say(place, lengths, rows=rows, seconds=seconds, console=console)
        kept.append(place)
    return kept


def _measure(
    source: Source, processor: Processor, *, videos: VideoProcessor, phase: TrainingPhase
) -> Callable[[int], MeasuredRow]:
    """What measures a row, in whatever process."""

    def measure(row: int) -> MeasuredRow:
        try:
            made = tokenize_row(source, row, processor, videos=videos, phase=phase)
        except BadSampleError as error:
            if error.sample.kind == "masked":
                return MeasuredRow(remarks=(MASKED,))
            return MeasuredRow(bad=error.sample)
        visual, audio = tokens_of_media(made.tokens.ids, processor)
        grids, answers = tuple(chain(*made.grids)), made.tokens.answers
        return MeasuredRow(
            len(made.tokens.ids), grids, answers, visual, audio, remarks=made.remarks
        )

    return measure


def _printed(
    rows: Iterable[MeasuredRow], lengths: list[tuple[int, int, int]]
) -> Iterator[tuple[int, tuple[Grid, ...], int, tuple[Remark, ...]]]:
    """Tokens, grids, answers and remarks of the rows; prints what is wrong with them.

    Puts into ``lengths`` the tokens of each that can be used: all, of pictures, of sounds.
    """
    faults = PrintedFaults()
    for row in rows:
        if row.bad is not None:
            faults.add(row.bad)
        elif row.tokens:  # else the row is left out
            lengths.append((row.tokens, row.visual, row.audio))
        yield row.tokens, row.grids, row.answers, row.remarks
    faults.end()


def _say(
    place: Path,
    lengths: Sequence[tuple[int, int, int]],
    *,
    rows: int,
    seconds: float,
    console: Console,
) -> None:
    """What the file has, beside rows that leave themselves out."""
    bad = rows - len(lengths)
    console.print(
        f"{place}: {rows} rows in {seconds:.1f} s, "
        + (f"{bad} of which cannot be used." if bad else "all of which can be used."),
        highlight=False,
        soft_wrap=True,
    )
    if lengths:
        console.print(length_table(*zip(*lengths, strict=True)))
