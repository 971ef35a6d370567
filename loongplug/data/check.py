"""What ``loongplug data check`` does: read every row as training would, and tell what is wrong."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from loongplug.consoles import table_console
from loongplug.data.bad_samples import BadSample, BadSampleError, PrintedFaults, bad_as
from loongplug.data.blend import Source, open_source, parse_blend
from loongplug.data.conversation import Medium
from loongplug.data.dataset import require_length, tokenize_sample
from loongplug.data.formats import parse_conversation
from loongplug.data.kinds import kind_of, medium_grid, open_medium
from loongplug.data.lengths import fill_words, length_table, tokens_of_media
from loongplug.data.media_files import InlineFile
from loongplug.data.pixel_limits import FOLDERS_LIMITS, PixelLimits
from loongplug.data.positions import Grid
from loongplug.data.processor import MultiTurn, Processor, load_processor
from loongplug.data.remarks import MASKED, Remark, Remarks
from loongplug.data.rows import ANY_ROW, RowAccess
from loongplug.data.template import TrainingPhase
from loongplug.data.video import VideoProcessor, video_style_of
from loongplug.data.workers import map_rows

_KNOWN_FILES = 65_536  # whose decoding is remembered, in each process


@dataclass(frozen=True)
class CheckedRow:
    """What is wrong with a row, and how many tokens it has, None where that cannot be said."""

    where: str
    findings: tuple[BadSample, ...] = ()
    tokens: int | None = None
    visual_tokens: int = 0
    audio_tokens: int = 0
    remarks: tuple[Remark, ...] = ()


class RowChecker:
    """Everything that is wrong with a row, where training would stop at the first."""

    def __init__(
        self,
        processor: Processor,
        *,
        seq_length: int,
        training_phase: TrainingPhase,
        video_fps: float | None = None,
    ) -> None:
        self._processor = processor
        self._seq_length = seq_length
        self._phase = training_phase
        self._videos = VideoProcessor(processor, video_style_of(processor), fps=video_fps)
        self._fault = lru_cache(maxsize=_KNOWN_FILES)(_fault)

    def check(self, rows: Source, index: int) -> CheckedRow:
        """Decodes the row's media, too, each file once while it is remembered."""
        where = rows.where(index)
        try:
            with bad_as("row"):
                conversation = parse_conversation(
                    rows.read(index), where=where, ignored=rows.access.ignored
                )
        except BadSampleError as error:
            return CheckedRow(where, (error.sample,))
        if MASKED in conversation.remarks:
            return CheckedRow(where, remarks=conversation.remarks)
        findings: list[BadSample] = []
        remarks = list(conversation.remarks)
        opened: list[Medium] = []
        grids: list[Grid] = []
        try:
            media = conversation.media(rows.media_root(index))
        except ValueError as error:  # a part that its sample does not have
            return CheckedRow(where, (BadSample("media", str(error)),))
        for named in media:
            try:
                medium = open_medium(named, self._processor, videos=self._videos, where=where)
                grid = medium_grid(medium, self._processor, videos=self._videos, where=where)
            except ValueError as error:
                findings.append(BadSample("media", str(error)))
                continue
            # One within a row is there once, and would be kept whole.
            file = kind_of(medium).files(medium)[0]
            look = _fault if isinstance(file, InlineFile) else self._fault
            fault, odd = look(medium)
            if fault is not None:
                findings.append(BadSample("pixels", f"{where}: {fault}"))
            remarks += [("video", kind) for kind in odd]
            opened.append(medium)
            grids.append(grid)
        if findings:
            return CheckedRow(where, tuple(findings))
        try:
            tokens = tokenize_sample(
                conversation,
                self._processor,
                media=opened,
                grids=grids,
                videos=self._videos,
                phase=self._phase,
            )
        except BadSampleError as error:
            return CheckedRow(where, (error.sample,))
        visual, audio = tokens_of_media(tokens.ids, self._processor)
        try:
            require_length(*tokens.lengths, where=where, seq_length=self._seq_length)
        except BadSampleError as error:
            findings = [error.sample]
        return CheckedRow(where, tuple(findings), len(tokens.ids), visual, audio, tuple(remarks))


def _fault(medium: Medium) -> tuple[str | None, tuple[str, ...]]:
    """Why the pixels or the sound cannot be read, if they cannot; else what is odd of a video."""
    try:
        return None, tuple(kind_of(medium).checked(medium))
    except ValueError as error:
        return str(error).removeprefix(": "), ()


def check(
    data: Sequence[str],
    *,
    tokenizer_model: Path,
    seq_length: int,
    training_phase: TrainingPhase,
    access: RowAccess = ANY_ROW,
    video_fps: float | None,
    special_tokens_in_text: bool = False,
    literal_markers: bool = False,
    multi_turn: MultiTurn = "last",
    pixel_limits: PixelLimits = FOLDERS_LIMITS,
    processes: int | None,
) -> int:
    """Check every row of the files, print what is wrong, and return how many rows are.

    ``data`` is written as for ``--data-path``; weights play no part. What is wrong goes to
    standard output, the first rows of each fault in their order; the progress, the sum and remarks
    on rows to standard error.

    Raises:
        ValueError: one sentence on what is wrong with the folder, the files or the options.
    """
    if seq_length < 1:
        raise ValueError(f"--seq-length is {seq_length}: expected at least 1.")
    started = time.monotonic()
    console = table_console(stderr=True)
    paths = parse_blend(data, flag="--data").paths
    sources = [open_source(path, access=access) for path in paths]
    checker = RowChecker(
        load_processor(
            tokenizer_model,
            special_tokens_in_text=special_tokens_in_text,
            multi_turn=multi_turn,
            pixel_limits=pixel_limits,
        ),
        seq_length=seq_length,
        training_phase=training_phase,
        video_fps=video_fps,
    )
    ends = np.cumsum([len(source) for source in sources])

    def check_row(row: int) -> CheckedRow:
        source = int(np.searchsorted(ends, row, side="right"))
        return checker.check(sources[source], row - int(ends[source]) + len(sources[source]))

    total, bad, remarks = int(ends[-1]), 0, Remarks(literal_markers=literal_markers)
    kinds: Counter[str] = Counter()
    faults = PrintedFaults()
    lengths: list[tuple[int, int, int]] = []
    for row in map_rows(
        check_row, total, processes=processes, console=console, title="checking rows"
    ):
        remarks.add(row.remarks, where=row.where)
        bad += bool(row.findings)
        kinds.update(finding.kind for finding in row.findings)
        if row.tokens is not None:
            lengths.append((row.tokens, row.visual_tokens, row.audio_tokens))
        for finding in row.findings:
            faults.add(finding)
    faults.end()
    seconds = time.monotonic() - started
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    said = f"{bad} cannot be used ({counts})." if bad else "all can be used."
    for line in (f"{total} rows in {seconds:.1f} s: {said}", *remarks.totals()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if lengths:
        tokens, visual, audio = zip(*lengths, strict=True)
        console.print(length_table(tokens, visual, audio))
        console.print(fill_words(tokens, seq_length=seq_length), highlight=False, soft_wrap=True)
    return bad
