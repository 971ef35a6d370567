"""What ``loongplug data inspect`` does: show samples as the model will see them, and how long."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from loongplug.data.bad_samples import Remarks
from loongplug.data.blend import open_rows
from loongplug.data.dataset import Survey, Surveyor
from loongplug.data.media_kinds import KINDS, kind_of
from loongplug.data.processor import Processor
from loongplug.data.sample import among
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.workers import map_rows
from loongplug.output_files import MADE_BY, check_pictures


def inspect(
    data: Sequence[str],
    settings: SurveySettings,
    *,
    literal_markers: bool = False,
    samples: int,
    plots: Path | None,
    processes: int | None,
) -> None:
    """Print ``samples`` samples, evenly chosen, and what all of them come to.

    With a folder ``plots``, reads every row and writes ``lengths.png`` and ``images.png`` there.
    """
    check_pictures(plots, ["lengths.png", "images.png"])  # better now than after the work
    console = Console(highlight=False, soft_wrap=True)
    surveyor = Surveyor.of(settings)
    rows = open_rows(data, flag="--data", seed=0, access=settings.access)
    remarks = Remarks(literal_markers=literal_markers)
    for index in np.linspace(0, len(rows) - 1, min(samples, len(rows))).round().astype(int):
        survey = surveyor(rows, int(index))
        if survey.tokens is None:
            console.print(escape(survey.findings[0].message), style="red")
        else:
            remarks.add(survey.remarks, where=survey.where)
            for line in describe(survey, surveyor.processor):
                console.print(line)
        console.print()
    for line in remarks.totals():
        console.print(f"Of the rows shown: {line}", markup=False)
    if plots is None:
        return

    rows_of = partial(map_rows, processes=processes, console=Console(stderr=True))
    measured = list(
        rows_of(lambda row: surveyor(rows, row).extent, len(rows), title="measuring rows")
    )
    usable = [(each.tokens, len(each.numbers)) for each in measured if each.tokens]
    if left_out := len(measured) - len(usable):
        console.print(
            f"{left_out} of {len(measured)} rows cannot be used and are left out:"
            " loongplug data check tells why."
        )
    if not usable:
        raise ValueError("No row can be used, so there is nothing to draw.")
    lengths, media = np.array(usable).T
    per_sample = f"{_media_words(surveyor.processor)} per sample"
    console.print(_quantiles("tokens per sample", lengths))
    console.print(_quantiles(per_sample, media))
    plots.mkdir(parents=True, exist_ok=True)
    draw_histogram(lengths, plots / "lengths.png", label="tokens per sample")
    draw_histogram(media, plots / "images.png", label=per_sample)
    console.print(f"Histograms: {plots / 'lengths.png'}, {plots / 'images.png'}")


def describe(survey: Survey, processor: Processor) -> Iterator[str]:
    """Lines in rich's markup: the sample's sizes, its media, and its tokens in runs."""
    tokens, numbers = survey.tokens, survey.extent.numbers
    assert tokens is not None, "the row can be used"
    starts = np.cumsum((0, *tokens.lengths[:-1]))  # of renderings
    trained = tokens.trained.copy()
    trained[starts] = False  # nothing says them beforehand
    yield (
        f"[bold]{escape(survey.where)}[/bold]: {len(trained)} tokens, {survey.extent.trained} of"
        f" them trained, {len(numbers)} {_media_words(processor)}"
    )
    for number in numbers:
        medium, grid = survey.media[number], survey.extent.media[number].grid
        kind = kind_of(medium)
        said = escape(kind.described(medium, where=survey.where))
        yield f"  {said}: {kind.tokens(grid, processor)} tokens"
    changes = np.union1d(np.flatnonzero(np.diff(trained)) + 1, starts[1:])
    for run in np.split(np.arange(len(trained)), changes):
        if run[0] in starts[1:]:
            yield "  and in another rendering, with its media again:"
        text = escape(_text(tokens.ids[run], processor))
        mark, style = ("+", "green") if trained[run[0]] else (" ", "dim")
        yield f"{mark} {len(run):5d}  [{style}]{text}[/{style}]"


def _media_words(processor: Processor) -> str:
    if processor.audio is None:
        return "images and videos"
    return "sounds" if processor.images is None else "images, videos and sounds"


def _text(ids: NDArray[np.int64], processor: Processor) -> str:
    """The tokens' text on one line, runs of one medium's token counted."""
    pieces = []
    places = processor.places(*KINDS)
    media = among(ids, places)
    changes = np.flatnonzero((np.diff(ids) != 0) & (media[1:] | media[:-1])) + 1
    for part in np.split(ids, changes):
        if part[0] in places:
            pieces.append(f"{processor.tokenizer.decode(part[:1])} x {len(part)}")
        else:
            pieces.append(processor.tokenizer.decode(part))
    return "".join(pieces).replace("\n", "\\n")


def _quantiles(name: str, values: NDArray[np.int64]) -> str:
    least, median, ninety, most = np.quantile(values, (0, 0.5, 0.9, 1)).round().astype(int)
    return (
        f"{name}: {least} to {most}, median {median}, 90 % up to {ninety}, {values.sum()} in"
        f" {len(values)} samples"
    )


def draw_histogram(values: NDArray[np.int64], path: Path, *, label: str) -> None:
    """Write a histogram of the values [samples] as a PNG; one bar per number while they are few."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    low, high = int(values.min()), int(values.max())
    edges = [value - 0.5 for value in range(low, high + 2)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=edges if high - low < 50 else 50, edgecolor="white", linewidth=0.5)
    axes.set_xlabel(label)
    axes.set_ylabel("samples")
    for axis in (axes.xaxis, axes.yaxis):  # both count
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata=MADE_BY)
