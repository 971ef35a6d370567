"""What ``loongplug data check`` and ``index`` do: survey every row, tell faults, keep an index."""

import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from loongplug.consoles import table_console
from loongplug.data.bad_samples import Remarks
from loongplug.data.blend import Source, open_source, parse_blend
from loongplug.data.cache_folder import NotKeptError
from loongplug.data.dataset import Survey, Surveyor
from loongplug.data.extent_index import ExtentTable, keep_table, kept_table, made_of, path_of
from loongplug.data.packing import LOOK_AHEAD, packs_once
from loongplug.data.sample import BadSample, Remark, RowExtent
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.workers import Pool, WorkerSettings, map_rows

_COLUMNS = (("median", 50), ("90 %", 90), ("99 %", 99), ("longest", 100))
_MOST_ALIKE = 5  # that are printed
_OWN_WORDS = re.compile(r"""'[^']*'|"[^"]*"|\S*[\d./]\S*""")  # of a row, not of its fault


def check(
    data: Sequence[str],
    settings: SurveySettings,
    *,
    seq_length: int,
    literal_markers: bool = False,
    processes: int | None = None,
) -> int:
    """Check every row of the files, print what is wrong, and return how many rows are.

    What is wrong goes to standard output, all else to standard error. Files have an index
    afterwards. ValueError says in one sentence what is wrong with folder, files or options.
    """
    if seq_length < 1:
        raise ValueError(f"--seq-length is {seq_length}: expected at least 1.")
    console = table_console(stderr=True)
    mapped = partial(map_rows, processes=processes, console=console)
    paths = parse_blend(data, flag="--data").paths
    sources = [open_source(path, access=settings.access) for path in paths]
    surveyor = Surveyor.of(settings, seq_length=seq_length)
    found = _Found(surveyor, console, literal_markers=literal_markers)
    for source in sources:
        survey = _survey_of(source, surveyor, decodes=True)
        made = mapped(survey, len(source), title="checking rows")
        # Of all splits of an energon folder none is trained on as such.
        if getattr(source, "split", "") is None:
            deque(map(found.add, made), maxlen=0)
            continue
        with suppress(NotKeptError):
            keep_survey(source, made, settings, heard=found.add, asked=False)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(found.kinds.items()))
    found.tell(
        f"{found.rows} rows",
        f"{found.bad} cannot be used ({counts})." if found.bad else "all can be used.",
    )
    if found.lengths:
        tokens = [each for each, _, _ in found.lengths]
        console.print(fill_words(tokens, seq_length=seq_length), highlight=False, soft_wrap=True)
    return found.bad


def index(
    data: Sequence[str], settings: SurveySettings, *, processes: int | None = None
) -> list[Path]:
    """Make the index of each of the files, in place of one that it has; gives where they are.

    ``data`` is as of :func:`check`. Of energon datasets, the split ``train`` is read.
    """
    console = table_console(stderr=True)
    mapped = partial(map_rows, processes=processes, console=console)
    paths = dict.fromkeys(parse_blend(data, flag="FILES").paths)
    sources = [open_source(path, split="train", access=settings.access) for path in paths]
    surveyor = Surveyor.of(settings)
    kept = []
    for source in sources:
        # Its remarks are told where it is used.
        found = _Found(surveyor, console, silent=True)
        made = mapped(_survey_of(source, surveyor), len(source), title="indexing rows")
        kept.append(keep_survey(source, made, settings, heard=found.add, asked=True))
        bad = f"{found.bad} of which cannot be used." if found.bad else "all of which can be used."
        found.tell(f"{kept[-1]}: {found.rows - found.left_out} rows", bad)
    return kept


def _survey_of(
    source: Source, surveyor: Surveyor, *, decodes: bool = False
) -> Callable[[int], Survey]:
    """What surveys a row, without its tokens and media."""
    return lambda row: replace(surveyor(source, row, decodes=decodes), tokens=None, media=())


def keep_survey(
    source: Source,
    rows: Iterable[Survey],
    settings: SurveySettings,
    *,
    heard: Callable[[Survey], object],
    asked: bool,
) -> Path:
    """Survey all ``rows`` of a file, each ``heard`` in its turn, and keep the index; ValueError."""
    known, differ = made_of(source, settings), False

    def extents() -> Iterator[tuple[RowExtent, Sequence[Remark]]]:
        nonlocal differ
        for row in rows:
            heard(row)
            differ = differ or row.turns_differ
            yield row.extent, row.remarks

    table = ExtentTable.of(extents())
    if made_of(source, settings) != known:
        raise ValueError(f"{path_of(source)} changed while it was read: index it again.")
    return keep_table(source, table, settings, known=known, turns_differ=differ, asked=asked)


def index_beside(
    sources: Sequence[Source], surveyor: Surveyor, settings: SurveySettings
) -> Pool[int, None]:
    """Index files in a process of the lowest priority, which ends with what is given."""

    def work(number: int) -> None:
        os.nice(19)
        # Nobody asks what came of it: where it fails, the next run begins again.
        with suppress(ValueError):
            if kept_table(sources[number], settings) is not None:  # a blend lacks another's
                return
        rows = map(_survey_of(sources[number], surveyor), range(len(sources[number])))
        keep_survey(sources[number], rows, settings, heard=lambda row: None, asked=False)

    pool = Pool(work, settings=WorkerSettings(processes=1))
    for number in range(len(sources)):
        pool.submit(number)
    return pool


class _Found:
    """What a person is told of surveyed rows."""

    def __init__(
        self,
        surveyor: Surveyor,
        console: Console,
        *,
        literal_markers: bool = False,
        silent: bool = False,
    ) -> None:
        self._processor = surveyor.processor
        self._console = console
        self._started = time.monotonic()
        self._remarks = Remarks(literal_markers=literal_markers, indexed=silent)
        self._faults: dict[str, tuple[str, int]] = {}  # where the first is, and how many there are
        self.rows = self.left_out = self.bad = 0
        self.kinds: Counter[str] = Counter()  # of faults
        self.lengths: list[tuple[int, int, int]] = []  # of rows that can be used

    def add(self, row: Survey) -> None:
        """One more, in the rows' order; prints what is wrong with it."""
        faults = [each for each in row.findings if each.kind != "masked"]
        self.rows += 1
        self.left_out += len(faults) < len(row.findings)
        self.bad += bool(faults)
        self.kinds.update(each.kind for each in faults)
        for each in faults:
            self._print(each)
        self._remarks.add(row.remarks, where=row.where)
        if row.extent.tokens:
            places = self._processor.places("image", "video")
            visual = sum(run.length for run in row.extent.runs if run.token in places)
            media = sum(run.length for run in row.extent.runs)
            self.lengths.append((row.extent.tokens, visual, media - visual))

    def _print(self, bad: BadSample) -> None:
        """The first of each fault, whatever numbers, names of files and quotations are in it."""
        fault = _OWN_WORDS.sub("", bad.message)
        # Names of files may be bytes that are no text, which could not be printed.
        line = bad.message.encode(errors="backslashreplace").decode()
        first, count = self._faults.get(fault, (line.split(": ")[0], 0))
        self._faults[fault] = first, count + 1
        if count < _MOST_ALIKE:
            print(line, flush=True)

    def tell(self, head: str, said: str) -> None:
        for first, count in self._faults.values():
            if count > _MOST_ALIKE:
                print(f"{count - _MOST_ALIKE} more are like {first}", flush=True)
        seconds = time.monotonic() - self._started
        sums = f"{head} in {seconds:.1f} s, {said}"
        for line in (sums, *self._remarks.totals()):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self.lengths:
            self._console.print(length_table(*zip(*self.lengths, strict=True)))


def length_table(tokens: Sequence[int], visual: Sequence[int], audio: Sequence[int] = ()) -> Table:
    """Lengths of samples in tokens, and how many are of images and videos, and of any sounds."""
    table = Table(title="Lengths in tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    rows = [("samples", tokens), ("visual tokens", visual)]
    if any(audio):
        rows.append(("audio tokens", audio))
    for name, values in rows:
        # Lengths that are there, none between two of them.
        found = np.percentile(values, [share for _, share in _COLUMNS], method="higher")
        table.add_row(name, *(f"{value:,.0f}" for value in found))
    return table


def fill_words(tokens: Sequence[int], *, seq_length: int) -> str:
    """One sentence: what is longer than a sequence, and how full sequences would be."""
    fitting = [length for length in tokens if length <= seq_length]
    above = (len(tokens) - len(fitting)) / len(tokens)
    said = f"{above:.1%} of the samples are longer than --seq-length {seq_length:,}."
    if not fitting:
        return said
    padded = sum(fitting) / (len(fitting) * seq_length)
    packs = packs_once(fitting, seq_length=seq_length, look_ahead=LOOK_AHEAD)  # as training packs
    packed = sum(fitting) / (sum(1 for _ in packs) * seq_length)
    return (
        f"{said} Padded to that length, sequences are {padded:.1%} full; with --packing,"
        f" {packed:.1%} (of these rows in this order)."
    )
