"""Pictures of figures of the pages: ``PYTHONPATH=tests python -m pages.pictures`` draws them.

``docs/which_mode.svg`` is of ``docs/which_mode.csv``, which ``benchmarks/bench.py pipeline-tables
modes`` prints; ``docs/levels.svg`` is of the table of levels in ``docs/benchmarks.md``.
"""

import csv
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages.commands import ROOT, section

MODES, WHICH_MODE = ROOT / "docs" / "which_mode.csv", ROOT / "docs" / "which_mode.svg"
LEVELS, LEVELS_PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "levels.svg"

_ALIKE = 1.03  # modes whose steps are no further apart win together
_LINES = {  # by mode: its colour and its dashes
    "streamed": ("#00856a", "-"),
    "full_hetero_dp": ("#1f5fbf", "-"),
    "own_ranks": ("#d9730d", "-"),
    "uniform tuned": ("#777777", ":"),
    "uniform": ("#222222", "-"),
    "encoder_hetero_dp": ("#a33ea1", "--"),
}
_BARS = {"uniform": "#999999", "uniform tuned": "#777777"}  # those of other levels are blue

Steps = Mapping[tuple[int, int], Mapping[int, Mapping[str, float]]]
Levels = Mapping[str, Mapping[str, float]]


def steps(text: str) -> Steps:
    """Steps over the perfect one: by stages and microbatches, encoder's percent, and mode."""
    found: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        panel = found.setdefault((int(row["stages"]), int(row["microbatches"])), {})
        of_share = panel.setdefault(int(row["encoder"].rstrip("%")), {})
        of_share[row["mode"]] = float(row["step"])
    return found


def fastest(step: Mapping[str, float]) -> list[str]:
    """The modes whose step is no more than 3 % above the least."""
    return [mode for mode, each in step.items() if each <= min(step.values()) * _ALIKE]


def levels(page: str) -> Levels:
    """By setting and level, the rate over uniform's, from the table of levels."""
    found: dict[str, dict[str, float]] = {}
    for line in section(page, "Levels").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"\d\.\d\d", cells[3]):
            found.setdefault(cells[0], {})[cells[1]] = float(cells[3])
    return found


def digest(figures: object) -> str:
    """A name for figures, which their picture carries."""
    return hashlib.sha256(repr(figures).encode()).hexdigest()[:16]


def draw_modes(found: Steps, file: Path) -> None:
    """A panel for each number of stages and of microbatches, a line for each mode."""
    stages, microbatches = (sorted({each[axis] for each in found}) for axis in (0, 1))
    figure, axes = _figure(len(microbatches), len(stages), high=6.5)
    for (of_pipeline, of_step), by_share in found.items():
        axis = axes[microbatches.index(of_step)][stages.index(of_pipeline)]
        axis.set_title(f"{of_pipeline} stages, {of_step} mb", fontsize=9)
        axis.set(yscale="log", ylim=(0.97, 5.2), xlim=(4, 56), xticks=[*by_share])
        axis.set_yticks([1, 1.5, 2, 3, 4, 5], labels=["1", "1.5", "2", "3", "4", "5"])
        axis.minorticks_off()
        axis.grid(axis="y", color="#dddddd")
        axis.xaxis.set_major_formatter("{x} %")
        for mode, (colour, dashes) in reversed(_LINES.items()):  # the fastest above the others
            values = [step[mode] for step in by_share.values()]
            axis.plot([*by_share], values, dashes, color=colour, label=mode)
            for share, step in by_share.items():
                fill = colour if mode in fastest(step) else "white"
                axis.plot(share, step[mode], "o", markersize=4, color=colour, markerfacecolor=fill)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(
        *(lines[::-1], names[::-1]),
        title="Time of a step over the perfect step",
        title_fontproperties={"weight": "bold", "size": 10},
        loc="outside upper center",
        ncols=3,
        frameon=False,
    )
    figure.supxlabel("encoder's share of all work; mb: microbatches; full dot: fastest, within 3 %")
    _save(figure, file, found)


def draw_levels(found: Levels, file: Path) -> None:
    """A bar for each level, those of a setting together."""
    rows = [(setting, *each) for setting, by_level in found.items() for each in by_level.items()]
    figure, ((axis,),) = _figure(1, 1, high=0.24 * len(rows) + 0.6)
    for place, (_, level, rate) in enumerate(rows):
        bar = axis.barh(place, rate, color=_BARS.get(level, "#1f5fbf"))
        axis.bar_label(bar, fmt="%.2f", padding=3)
    axis.set_yticks(range(len(rows)), labels=[f"{setting}, {level}" for setting, level, _ in rows])
    axis.set(xticks=[], xlim=(0, 1.15 * max(rate for *_, rate in rows)))
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)
    axis.set_title("Tokens per second over those of uniform", fontweight="bold")
    _save(figure, file, found)


def _figure(rows: int, columns: int, *, high: float) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "pages"})
    return pyplot.subplots(
        rows, columns, figsize=(7, high), sharey=True, squeeze=False, layout="constrained"
    )


def _save(figure: Any, file: Path, figures: object) -> None:
    metadata = {"Date": None, "Description": digest(figures)}
    figure.savefig(file, bbox_inches="tight", metadata=metadata)


if __name__ == "__main__":
    draw_modes(steps(MODES.read_text(encoding="utf-8")), WHICH_MODE)
    draw_levels(levels(LEVELS.read_text(encoding="utf-8")), LEVELS_PICTURE)
